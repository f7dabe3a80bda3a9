"""A table of a validation's first decisions in those trackers of `trainer.logger` that have tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

TABLE = "val/decisions"
COLUMNS = ("step", "task", "episode", "agent", "turn", "prompt", "reply", "team_score", "local_score", "committed")
Rows = list[list[Any]]
_MLFLOW_TABLES = 64
"""Most files that MLflow shows as tables, the last ones; a tag's value may have 5,000 characters."""


def table_rows(decisions: Iterable[Mapping[str, Any]], most: int) -> Rows:
    """Returns the rows (`COLUMNS`) of a validation's records: whole episodes, the last cut at `most` decisions."""
    played = [one for one in decisions if not one.get("failed")]
    played.sort(key=lambda one: (one["task"], one["episode"], one["decision"]))
    return [
        [
            *(one[column] for column in COLUMNS[:6]),
            *(candidate["text"], candidate["team"], candidate["local"], number == one["committed"]),
        ]
        for one in played[:most]
        for number, candidate in enumerate(one["candidates"])
    ]


def write_table(trackers: Mapping[str, Any], rows: Rows, step: int) -> None:
    """Writes a validation's table to every tracker, of verl's `Tracking`, that has tables; without rows nothing.

    Call it from the thread that started the trackers: the runs of MLflow and trackio belong to a thread.
    """
    for name in trackers.keys() & _WRITERS.keys() if rows else ():
        _WRITERS[name](trackers[name], rows, step)


def _wandb(wandb: Any, rows: Rows, step: int) -> None:
    wandb.log({TABLE: wandb.Table(columns=[*COLUMNS], data=rows)}, step=step)


def _trackio(adapter: Any, rows: Rows, step: int) -> None:
    adapter.log({TABLE: adapter.trackio.Table(columns=[*COLUMNS], data=rows)}, step)


def _mlflow(_: Any, rows: Rows, step: int) -> None:
    # Not by log_table: what it appends to is read back with replies turned into numbers, and with a file of each
    # validation its tag, by which files are shown as tables, becomes too long after 130 of them.
    import mlflow

    file, tag = f"{TABLE}/step_{step:06d}.json", "mlflow.loggedArtifacts"
    try:
        mlflow.log_dict({"columns": [*COLUMNS], "data": rows}, file)
        shown = mlflow.get_run(mlflow.active_run().info.run_id).data.tags.get(tag, "[]")
        mlflow.set_tag(tag, json.dumps([*json.loads(shown), {"path": file, "type": "table"}][-_MLFLOW_TABLES:]))
    except (OSError, mlflow.exceptions.MlflowException) as error:
        logger.warning("MLflow did not take the table of step %s (%s); training goes on", step, error)


def _tensorboard(adapter: Any, rows: Rows, step: int) -> None:
    adapter.writer.add_text(TABLE, "\n\n".join(map(_as_markdown, rows)), step)


def _as_markdown(row: list[Any]) -> str:
    """Returns a decision as text for TensorBoard, whose tables keep neither lines nor tags."""
    cell = dict(zip(COLUMNS, row, strict=True))
    scores = f"team {cell['team_score']:.4g}, local {cell['local_score']:.4g}{', committed' * cell['committed']}"
    head = f"**task {cell['task']}, episode {cell['episode']}, {cell['agent']}, turn {cell['turn']}**: {scores}"
    code = ("\n".join(f"    {line}" for line in cell[text].splitlines() or [""]) for text in ("prompt", "reply"))
    return "\n\n".join((head, "prompt", next(code), "reply", next(code)))


def _swanlab(swanlab: Any, rows: Rows, step: int) -> None:
    table = swanlab.echarts.Table()
    table.add(headers=[*COLUMNS], rows=rows)
    swanlab.log({TABLE: table}, step=step)


def _clearml(adapter: Any, rows: Rows, step: int) -> None:
    import pandas

    adapter.log({TABLE: pandas.DataFrame(rows, columns=COLUMNS)}, step)


_WRITERS: dict[str, Callable[[Any, Rows, int], None]] = {
    "wandb": _wandb,
    "vemlp_wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "swanlab": _swanlab,
    "clearml": _clearml,
}
