"""Which causal language models of transformers take prefix trees: a small one of every kind, with trees and without.

python benchmarks/tree_families.py [KIND ...] [--device cuda]
"""

from __future__ import annotations

import logging

import script
from fakes.small_configs import kinds, small

from verl_atgrpo.train.engine.prefix_tree import twin
from verl_atgrpo.train.engine.prefix_tree.forward import FLEX


def main() -> None:
    parser = script.parser(__doc__, device="cpu")
    parser.add_argument("kinds", nargs="*")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    implementation = "sdpa" if options.device == "cpu" else FLEX
    exact: list[str] = []
    refused: dict[str, str] = {}
    for kind in options.kinds or kinds():
        try:
            config = small(kind)
        except Exception as error:  # noqa: BLE001  # whatever a configuration's class raises
            reason: str | None = f"no small configuration of it: {type(error).__name__}"
        else:
            reason = twin.refusal(config, implementation, options.device)
        print(f"{kind:28s} {reason or 'exact'}", flush=True)
        if reason is None:
            exact.append(kind)
        else:
            refused[kind] = reason
    print(f"\nexact ({len(exact)}): {', '.join(exact)}\nrefused ({len(refused)}): {', '.join(refused)}")


if __name__ == "__main__":
    main()
