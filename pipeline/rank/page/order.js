// The order that a rater gives: ranks, how they are shown beside the answers, and dragging. An answer's rank is its
// radio button that is checked; nothing else holds it.

const $ = (id) => document.getElementById(id);

export const answers = [...document.querySelectorAll(".answer")];
const radios = (answer) => [...answer.querySelectorAll(".ranks input")];
export const rankOf = (answer) => Number(radios(answer).find((radio) => radio.checked)?.value ?? 0); // 0: none yet
export const withRank = (rank) => answers.filter((answer) => rankOf(answer) === rank);
export const letters = (some) => some.map((answer) => answer.dataset.letter);

export function setRank(answer, rank) {
  for (const radio of radios(answer)) radio.checked = Number(radio.value) === rank;
}

// Give an answer a place of its own; the others make room towards the nearest rank that is free.
function insert(answer, place) {
  setRank(answer, 0);
  let free = place;
  while (free <= answers.length && withRank(free).length) free++;
  if (free <= answers.length) {
    for (let rank = free - 1; rank >= place; rank--) withRank(rank).forEach((other) => setRank(other, rank + 1));
    setRank(answer, place);
  } else {
    for (free = place - 1; withRank(free).length; ) free--;
    for (let rank = free + 1; rank < place; rank++) withRank(rank).forEach((other) => setRank(other, rank - 1));
    setRank(answer, place - 1);
  }
}

export function step(answer, by) {
  const rank = rankOf(answer);
  if (rank) return setRank(answer, Math.min(Math.max(rank + by, 1), answers.length));
  let free = 1;
  while (withRank(free).length) free++;
  setRank(answer, free);
}

export function groups() {
  const found = [];
  for (let rank = 1; rank <= answers.length; rank++) if (withRank(rank).length) found.push(letters(withRank(rank)));
  return found;
}

export function make(tag, attributes, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function chip(answer) {
  const { id, letter } = answer.dataset;
  const start = answer.querySelector(".text, code").textContent.trim().slice(0, 80);
  const button = (sign, word) =>
    make("button", { type: "button", tabindex: "-1", "aria-label": `Answer ${letter}: ${word}`, "data-step": word }, sign);
  return make(
    "div",
    { class: "chip", draggable: "true", "data-id": id },
    make("span", { class: "letter" }, letter),
    make("span", { class: "start", dir: "auto", "aria-hidden": "true" }, start),
    button("▲", "better"),
    button("▼", "worse"),
  );
}

export function show() {
  const num = answers.length;
  $("shelves").replaceChildren(
    ...answers.map((_, index) => {
      const rank = index + 1;
      const there = withRank(rank);
      const word = rank === 1 ? "best" : rank === num ? "worst" : there.length > 1 ? "tie" : "";
      const name = make("b", {}, String(rank), ...(word ? [make("small", {}, word)] : []));
      const filled = there.length ? " filled" : "";
      return make("li", { class: `shelf${filled}`, "data-rank": rank }, name, make("div", {}, ...there.map(chip)));
    }),
  );
  const missing = withRank(0);
  $("tray").replaceChildren(...missing.map(chip));
  $("waiting").textContent = missing.length ? "No rank yet" : "All have a rank";
  for (const answer of answers) answer.classList.toggle("ranked", rankOf(answer) > 0);
  const sequence = groups().map((group) => group.join(" = ")).join("  ›  ");
  $("summary").textContent = sequence || "No ranks yet; 1 is best";
}

let lifted = null;

function place(event) {
  const shelf = event.target.closest?.(".shelf");
  if (!shelf) return event.target.closest?.("#tray, #waiting") ? { over: $("tray"), rank: 0 } : null;
  const rank = Number(shelf.dataset.rank);
  if (!withRank(rank).some((answer) => answer !== lifted)) return { over: shelf, rank };
  const box = shelf.getBoundingClientRect();
  const share = (event.clientY - box.top) / box.height;
  if (share < 0.22) return { over: shelf, rank, edge: "before" };
  if (share > 0.78) return { over: shelf, rank: rank + 1, edge: "after" };
  return { over: shelf, rank };
}

function unmarkPlaces() {
  for (const element of document.querySelectorAll(".over, .before, .after"))
    element.classList.remove("over", "before", "after");
}

function end() {
  lifted = null;
  unmarkPlaces();
  show();
}

// `touched` is called with the answer that is dragged, `changed` with the one that was dropped.
export function watchDrags(touched, changed) {
  document.addEventListener("dragstart", (event) => {
    const from = event.target.closest?.(".chip, .answer");
    lifted = from ? answers.find((answer) => answer.dataset.id === from.dataset.id) : null;
    if (!lifted) return;
    event.dataTransfer.setData("text/plain", lifted.dataset.letter);
    event.dataTransfer.effectAllowed = "move";
    touched(lifted);
    const own = document.querySelector(`.chip[data-id="${lifted.dataset.id}"]`);
    if (own !== from) event.dataTransfer.setDragImage(own, 20, 20);
    setTimeout(() => own.classList.add("lifted")); // after the picture of it was taken
  });
  document.addEventListener("dragover", (event) => {
    const where = lifted && place(event);
    unmarkPlaces();
    if (!where) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "move";
    where.over.classList.add(where.edge ?? "over");
  });
  document.addEventListener("drop", (event) => {
    const where = lifted && place(event);
    if (!where) return;
    event.preventDefault();
    if (where.edge) insert(lifted, where.rank);
    else setRank(lifted, where.rank);
    changed(lifted);
    end();
  });
  document.addEventListener("dragend", end); // does not come if what was dragged is gone
  for (const answer of answers) answer.querySelector("header").draggable = true;
}
