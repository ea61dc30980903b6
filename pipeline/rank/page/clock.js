// Time on a prompt: what passes while the page is in sight, not paused, and somebody is there.

const $ = (id) => document.getElementById(id);

const IDLE = 180_000; // milliseconds without a sign of anybody, after which the page pauses

export const clock = {
  stopped: () => {}, // what to do when it stands still or goes on
  before: 0, // milliseconds up to `since`
  since: null, // null: stands still
  seen: performance.now(),
  spent() {
    return this.before + (this.since === null ? 0 : performance.now() - this.since);
  },
  run() {
    if (this.since === null && !document.hidden && !$("paused").open) this.since = this.seen = performance.now();
  },
  stop() {
    this.before = this.spent();
    this.since = null;
    this.stopped();
  },
  pause() {
    if ($("paused").open) return;
    this.stop();
    $("paused").showModal();
    this.stopped();
  },
  // Somebody is there; perhaps after hours in which the machine slept, and no tick came.
  sign() {
    this.pauseIfIdle();
    this.seen = performance.now();
  },
  pauseIfIdle() {
    const idle = performance.now() - this.seen;
    if (this.since === null || idle <= IDLE) return;
    this.pause();
    this.before -= idle; // nobody was there
    this.stopped();
  },
  tick() {
    this.pauseIfIdle();
    const seconds = Math.floor(this.spent() / 1000);
    $("clock").textContent = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
  },
};

export function watchTime() {
  document.addEventListener("visibilitychange", () => (document.hidden ? clock.stop() : clock.run()));
  addEventListener("pagehide", () => clock.stop());
  addEventListener("pageshow", () => clock.run());
  for (const sign of ["pointermove", "pointerdown", "keydown", "scroll", "dragover"])
    addEventListener(sign, () => clock.sign(), { passive: true, capture: true });
  $("pause").addEventListener("click", () => clock.pause());
  $("paused").addEventListener("close", () => {
    clock.run();
    clock.stopped();
  });
  setInterval(() => clock.tick(), 1000);
  clock.tick();
}
