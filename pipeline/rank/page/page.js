// The page on which answers are ranked: keys, drafts and what binds the other files together. The forms of the page
// work without any of this.

import { clock, watchTime } from "./clock.js";
import { answers, groups, letters, make, rankOf, setRank, show, step, watchDrags, withRank } from "./order.js";
import { isBusy, send } from "./send.js";

const $ = (id) => document.getElementById(id);
const form = $("ranking");

function tell(problem) {
  $("problem").textContent = problem;
}

document.addEventListener("submit", (event) => {
  const { target, submitter } = event;
  if (!target.matches("[data-send]")) return;
  event.preventDefault();
  if (isBusy() || (target === form && !submitter?.name && complain())) return;
  send(target, submitter, clock.spent() / 1000, tell);
});

// What is missing, said; nothing if nothing is.
function complain() {
  const missing = withRank(0);
  if (!missing.length) return false;
  const [is, it] = missing.length > 1 ? ["have", "them"] : ["has", "it"];
  tell(`${letters(missing).join(", ")} ${is} no rank yet: give ${it} one, or say “All bad”.`);
  mark(missing[0]);
  return true;
}

function changed(answer) {
  show();
  keep();
  if (!withRank(0).length) tell("");
  const rank = rankOf(answer);
  const tied = letters(withRank(rank).filter((other) => other !== answer));
  const where = rank ? `rank ${rank} of ${answers.length}${tied.length ? `, tied with ${tied.join(" and ")}` : ""}` : "no rank";
  say(`Answer ${answer.dataset.letter}: ${where}. ${groups().map((group) => group.join(" and ")).join(", then ")}.`);
}

function say(text) {
  $("said").textContent = text;
}

let marked = null; // the answer that keys are about

function mark(answer, focus = true) {
  marked?.classList.remove("marked");
  marked = answer;
  marked.classList.add("marked");
  if (!focus) return;
  marked.focus({ preventScroll: true });
  marked.scrollIntoView({ block: "nearest" });
}

// -- keys ----------------------------------------------------------------------------------------------------------

function rankByKey(rank) {
  if (rank > answers.length) return;
  const answer = marked;
  const was = rankOf(answer);
  setRank(answer, rank);
  changed(answer);
  const next = [...answers, ...answers].slice(answers.indexOf(answer) + 1).find((other) => !rankOf(other));
  mark(rank && !was && next ? next : answer);
}

function open(details, field) {
  $(details).open = true;
  $(field).focus();
}

const LETTERS = {
  u: () => $("undo").querySelector("button").click(),
  s: () => $("skip").requestSubmit(),
  b: () => $("all-bad").click(),
  f: () => open("flagging", "reason"),
  n: () => open("more", "note"),
  p: () => clock.pause(),
};
const MOVES = { ArrowUp: -1, ArrowDown: 1 };
const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

// What a key says on this page, whatever the layout: by what it writes, and where that is no letter or digit of ours
// (Cyrillic, Persian, French digits, which want Shift), by where it is.
function meant({ key, code, shiftKey }) {
  if (/^[0-9]$/.test(key)) return key;
  const [, digit, letter] = /^(?:Digit([0-9])|Key([A-Z]))$/.exec(code) ?? [];
  if (digit && !shiftKey) return digit;
  return letter && key.length === 1 && key > "\x7f" ? letter.toLowerCase() : key;
}

function onKey(event) {
  const { target } = event;
  const key = meant(event);
  if (event.altKey || event.metaKey || event.isComposing || isBusy() || $("paused")?.open) return;
  if (target.matches("textarea, input:not([type=radio], [type=checkbox])")) {
    if (key === "Escape") mark(marked);
    else if (key === "Enter" && event.ctrlKey && target.id === "note") $("submit").click();
    else return;
    return event.preventDefault();
  }
  if (event.ctrlKey) return;
  const onControl = target.closest("button, a, summary, input[type=checkbox], .strength");
  if (/^[0-9]$/.test(key) && form && !target.closest(".strength") && (lettersAreKeys() || target.closest(".answer")))
    rankByKey(Number(key));
  else if (key === "Enter" && form && !onControl) $("submit").click();
  else if (key in MOVES && form && !onControl && !target.matches("pre"))
    mark(answers[Math.min(Math.max(answers.indexOf(marked) + MOVES[key], 0), answers.length - 1)]);
  else if (key in STEPS && form && !onControl && !target.matches("pre")) {
    step(marked, STEPS[key]);
    changed(marked);
    mark(marked);
  } else if (key.toLowerCase() in LETTERS && lettersAreKeys() && (form || key.toLowerCase() === "u")) {
    if (event.repeat) return;
    LETTERS[key.toLowerCase()]();
  } else return;
  event.preventDefault();
}

const lettersAreKeys = () => localStorage.getItem("letters") !== "off";

// -- what is not sent yet outlives a reload, and what was sent can be undone with its note ---------------------------

const key = `draft ${form?.dataset.key}`;
const KEPT = 20; // drafts

function keep() {
  const ranks = Object.fromEntries(answers.map((answer) => [answer.dataset.id, rankOf(answer)]));
  const { strength, note } = form.elements;
  const said = { ranks, strength: strength.value, note: note.value, reason: $("reason").value };
  const draft = { ...said, spent: clock.spent(), paused: $("paused").open, at: Date.now() };
  sessionStorage.setItem(key, JSON.stringify(draft));
  const all = Object.keys(sessionStorage).filter((name) => name.startsWith("draft "));
  const age = (name) => JSON.parse(sessionStorage.getItem(name)).at;
  if (all.length > KEPT) sessionStorage.removeItem(all.sort((a, b) => age(a) - age(b))[0]);
}

function restore() {
  const draft = JSON.parse(sessionStorage.getItem(key) ?? "null");
  if (!draft) return;
  for (const answer of answers) setRank(answer, draft.ranks[answer.dataset.id] ?? 0);
  if (draft.strength) form.elements.strength.value = draft.strength;
  form.elements.note.value = draft.note;
  $("reason").value = draft.reason;
  $("more").open = Boolean(draft.strength || draft.note);
  clock.before = draft.spent;
  if (draft.paused) $("paused").showModal();
}

// -- long texts ----------------------------------------------------------------------------------------------------

function fold() {
  for (const text of document.querySelectorAll(".folding")) {
    if (text.scrollHeight < 1.5 * 26 * 16) continue; // as the style sheet has it, and what is left is worth a click
    const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false" }, "Show all");
    text.classList.add("folded");
    text.after(button);
    button.addEventListener("click", () => {
      const folded = text.classList.toggle("folded");
      button.textContent = folded ? "Show all" : "Show less";
      button.setAttribute("aria-expanded", String(!folded));
      if (folded) text.closest(".card").scrollIntoView({ block: "nearest" });
    });
  }
}

// -- start ---------------------------------------------------------------------------------------------------------

document.documentElement.classList.add("scripted");
document.addEventListener("keydown", onKey);
if (form) {
  form.noValidate = true; // complain() says it in words
  restore();
  fold();
  watchDrags((answer) => mark(answer, false), changed);
  clock.stopped = keep;
  watchTime();
  show();
  mark(withRank(0)[0] ?? answers[0], false);
  clock.run();
  form.addEventListener("input", (event) => {
    const answer = event.target.closest(".answer");
    if (answer) {
      mark(answer, false);
      changed(answer);
    } else keep();
  });
  $("reason").addEventListener("input", keep);
  for (const answer of answers) {
    answer.addEventListener("focusin", () => mark(answer, false));
    answer.addEventListener("pointerdown", () => mark(answer, false));
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-step]");
    if (!button) return;
    const answer = answers.find((one) => one.dataset.id === button.closest(".chip").dataset.id);
    step(answer, button.dataset.step === "better" ? -1 : 1);
    changed(answer);
    mark(answer, false);
  });
  // The column scrolls by itself where the window is low: what is opened comes into sight whole.
  document.addEventListener("toggle", ({ target }) => target.open && target.scrollIntoView({ block: "nearest" }), true);
  $("letters").checked = lettersAreKeys();
  $("letters").addEventListener("change", (event) => localStorage.setItem("letters", event.target.checked ? "on" : "off"));
}
