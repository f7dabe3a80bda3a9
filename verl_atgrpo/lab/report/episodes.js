"use strict";
// The episode browser. The URL fragment has the selected split, step, task and episode.

const SPLITS = {val: "Validation", train: "Training"};
const DEEPEST = 4;
// The decision that a scope hangs from, and the candidate: `planner.0=2.1/` is the second continuation of the planner's
// third candidate, `planner.0.2/` what that one's score decided, `planner.0.2.later/` what settled it, `.all` of all.
const SCOPE = /^((?:.*\/)?)([^/=]+?)\.(\d+)(?:=(\d+)\.(\d+)|\.(\d+|all)(\.later)?)\/$/;

/** Returns in words where a decision of this scope is made; nothing for one of the episode itself. */
function placed(scope) {
  const found = SCOPE.exec(scope);
  if (!found) return scope;
  const [, above, agent, turn, branched, continuation, scored, later] = found;
  const answer = branched || scored;
  const which = answer === "all" ? "all answers" : `answer ${Number(answer) + 1}`;
  const from = `${which} of ${agent}, turn ${Number(turn) + 1}`;
  const again = Number(continuation) ? `, continuation ${Number(continuation) + 1}` : "";
  const here = branched ? `after ${from}${again}` : `${later ? "settles" : "scores"} ${from}`;
  return above ? `${here}; ${placed(above)}` : here;
}

/** Returns [decision, depth] depth first: a decision is followed by those that hang from its candidates. */
function asTree(decisions) {
  const name = (one) => `${one.scope}${one.agent}.${one.turn}`;
  const known = new Set(decisions.map(name));
  const below = new Map();
  for (const one of decisions) {
    const found = SCOPE.exec(one.scope);
    const above = found ? `${found[1]}${found[2]}.${found[3]}` : "";
    const parent = known.has(above) ? above : "";
    below.set(parent, [...(below.get(parent) || []), one]);
  }
  const from = (parent, depth) => (below.get(parent) || []).flatMap(
    (one) => [[one, depth], ...from(name(one), depth + 1)]);
  return from("", 0);
}

/** Draws the browser of `episodes` into `place`; agents decide colours, `policies` is the number of policies. */
function browseEpisodes(place, episodes, agents, policies) {
  if (!episodes.length) {
    place.append(make("p", {}, "No episodes were recorded."));
    return;
  }
  const splits = Object.keys(SPLITS).filter((split) => episodes.some((episode) => episode.split === split));
  let shown = null;

  const of = (split, step) => episodes.filter((one) => one.split === split && (step === null || one.step === step));
  const steps = (split) => [...new Set(of(split, null).map((one) => one.step))].sort((a, b) => a - b);

  /** Returns the episode of a step that corresponds to the selected one: the same task, or the same rank. */
  function similar(split, step) {
    const there = of(split, step);
    const same = shown && there.find((one) => one.task === shown.task && one.episode === shown.episode);
    const rank = shown ? of(shown.split, shown.step).indexOf(shown) : 0;
    return same || there[Math.min(rank, there.length - 1)];
  }

  function open(episode) {
    shown = episode;
    const address = new URLSearchParams({
      split: episode.split, step: episode.step, task: episode.task, episode: episode.episode});
    history.replaceState(null, "", `#${address}`);
    draw();
  }

  function fromAddress() {
    const address = new URLSearchParams(location.hash.slice(1));
    const wanted = episodes.find((one) => ["split", "step", "task", "episode"].every(
      (name) => String(one[name]) === address.get(name)));
    if (wanted && wanted !== shown) open(wanted);
    return Boolean(wanted);
  }

  function bar() {
    const known = steps(shown.split);
    const at = known.indexOf(shown.step);
    const turn = (label, by) => make("button", {
      type: "button", id: by < 0 ? "previous" : "next", disabled: known[at + by] === undefined,
      onclick: () => open(similar(shown.split, known[at + by]))}, label);
    const choice = make("select", {"aria-label": "step", id: "step"},
      ...known.map((step) => make("option", {value: step, selected: step === shown.step}, `step ${step}`)));
    choice.onchange = () => open(similar(shown.split, Number(choice.value)));
    return make("div", {class: "bar"},
      ...splits.map((split) => make("button", {
        type: "button", id: `split-${split}`, "aria-pressed": String(split === shown.split),
        onclick: () => split !== shown.split && open(similar(split, steps(split).at(-1)))}, SPLITS[split])),
      make("span", {class: "space"}), turn("◀ earlier", -1), choice, turn("later ▶", 1));
  }

  /** Returns the table of episodes: columns are steps, rows are tasks (validation) or ranks in the step (training). */
  function map() {
    const known = steps(shown.split);
    const columns = known.map((step) => of(shown.split, step));
    const byTask = shown.split === "val";
    const id = (one, place) => byTask ? `task ${one.task}, episode ${one.episode}` : `episode ${place + 1} of the step`;
    const rows = new Map();
    columns.forEach((column, at) => column.forEach((one, place) => {
      if (!rows.has(id(one, place))) rows.set(id(one, place), new Array(columns.length));
      rows.get(id(one, place))[at] = one;
    }));
    const several = byTask && episodes.some((one) => one.split === "val" && one.episode > 0);
    const cell = (one) => make("td", {}, ...(one ? [make("button", {
      type: "button", class: one.success ? "solved" : "unsolved", title: describe(one),
      "aria-label": describe(one), "aria-current": String(one === shown), onclick: () => open(one),
    }, one.failed ? "!" : one.success ? "✓" : "✗")] : []));
    return make("div", {class: "map"}, make("table", {},
      make("thead", {}, make("tr", {}, make("th", {scope: "row"}, "step"),
        ...known.map((step) => make("th", {scope: "col"}, String(step))))),
      make("tbody", {}, ...[...rows].map(([label, cells]) => make("tr", {},
        make("th", {scope: "row"}, byTask && !several ? label.split(",")[0] : label),
        ...Array.from(cells, cell))))));
  }

  function describe(one) {
    const end = one.failed ? "failed: a candidate could not be generated" : one.success ? "solved" : "not solved";
    return `step ${one.step}, task ${one.task}, episode ${one.episode}: ${end}, reward ${short(one.reward)}`;
  }

  function decision([one, depth]) {
    const colour = Math.max(0, agents.indexOf(one.agent)) % COLOURS;
    const answer = make("pre", {class: "text"});
    const caption = make("div", {class: "label"});
    const critic = "critic" in one.candidates[0] ? ["critic"] : [];
    const columns = ["tokens", "team", "local", ...critic, "reward", "advantage"];
    const rows = one.candidates.map((candidate, number) => {
      const figures = columns.map((name) => [name, candidate[name]]);
      const row = make("tr", {class: number === one.committed ? "committed" : ""},
        make("td", {}, make("button", {type: "button", title: "show the whole answer", onclick: () => choose(number)},
          `${number + 1}${number === one.committed ? " ✓" : ""} ${preview(candidate.text)}`)),
        ...figures.map(([name, value]) => make("td", {
          "data-name": name, class: name !== "advantage" || !value ? "" : value > 0 ? "plus" : "minus",
        }, value === null ? "–" : (name === "advantage" && value > 0 ? "+" : "") + short(value))));
      return row;
    });

    function choose(number) {
      rows.forEach((row, index) => row.classList.toggle("chosen", index === number));
      const candidate = one.candidates[number];
      caption.textContent = `answer ${number + 1}`
        + (number === one.committed ? ", committed: the episode went on with it" : ", not committed")
        + (candidate.truncated ? ", cut off at the length limit" : "");
      answer.textContent = candidate.text;
    }

    choose(one.committed);
    const head = ["answer", ...columns].map((name) => make("th", {scope: "col"}, name));
    return make("article", {class: `card depth${Math.min(depth, DEEPEST)}`},
      make("header", {}, make("span", {class: `dot fill${colour}`}),
        make("h3", {}, `${one.agent}, turn ${one.turn + 1}`),
        make("span", {class: "note place"}, placed(one.scope)),
        make("span", {class: "note"}, policies > 1 ? `policy ${one.policy}` : ""),
        make("span", {class: "note"}, `prompt of ${one.prompt_tokens} ${one.prompt_tokens === 1 ? "token" : "tokens"}`)),
      make("div", {class: "columns"},
        make("div", {}, make("div", {class: "label"}, "prompt"), make("pre", {class: "prompt"}, one.prompt)),
        make("div", {}, make("div", {class: "label"}, one.candidates.length > 1
          ? `${one.candidates.length} candidates` : "one candidate"),
          make("table", {class: "candidates"}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)),
          make("div", {class: "answer"}, caption, answer))));
  }

  const preview = (text) => {
    const line = text.replace(/\s+/g, " ").trim();
    return line.length > 80 ? `${line.slice(0, 80)}…` : line || "(nothing)";
  };

  function draw() {
    const end = shown.failed ? "failed" : shown.success ? "solved" : "not solved";
    const focused = document.activeElement && document.activeElement.id;
    place.replaceChildren(bar(), map(),
      make("div", {class: "bar", id: "shown"}, make("strong", {}, `Step ${shown.step}, task ${shown.task}`
        + (shown.episode ? `, episode ${shown.episode}` : "")),
        make("span", {class: `badge ${shown.success ? "solved" : "unsolved"}`}, end),
        make("span", {class: "note"}, `reward of the episode ${short(shown.reward)}, ${shown.decisions.length} ${shown.decisions.length === 1 ? "decision" : "decisions"}`)),
      ...asTree(shown.decisions).map(decision));
    const again = focused && document.getElementById(focused);
    if (again) again.focus({preventScroll: true});
    const current = place.querySelector('[aria-current="true"]');
    const table = place.querySelector(".map");
    if (current) table.scrollLeft = current.offsetLeft - table.clientWidth / 2;
  }

  addEventListener("hashchange", fromAddress);
  if (!fromAddress()) {
    shown = of(splits[0], steps(splits[0]).at(-1))[0];
    draw();
  }
}
