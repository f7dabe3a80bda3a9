"use strict";
// Builds the page from its embedded data.

const data = JSON.parse(document.getElementById("data").textContent);
document.getElementById("title").textContent = data.title;
document.getElementById("about").textContent = data.about.join(" · ");
document.getElementById("figures").append(...data.figures.map((figure) => make("li", {},
  make("div", {class: "label"}, figure.label), make("div", {class: "value"}, figure.value),
  make("div", {class: "note"}, figure.note))));
document.getElementById("notes").append(...data.notes.map((note) => make("li", {}, note)));
document.getElementById("curves").append(...data.panels.map(drawPanel));
const taken = data.episodes.flatMap((episode) => episode.decisions);
browseEpisodes(document.getElementById("episodes"), data.episodes,
  [...new Set(taken.map((decision) => decision.agent))].sort(),
  new Set(taken.map((decision) => decision.policy)).size);
