// What the page remembers: a bounded number of seconds and of finished requests, whatever the server did.

import { known } from "./format.js";

export const SECONDS = 900;
export const REQUESTS = 40;

export class History {
  constructor() {
    this.clear(null);
  }

  clear(started) {
    this.started = started;
    this.times = [];
    this.series = {};
    this.finished = [];
    this.since = 0;
  }

  // Takes the newer part that a snapshot brings. A server that was started anew begins with an empty history.
  merge(stats) {
    if (stats.server.started !== this.started) this.clear(stats.server.started);
    const { times, series } = stats.history;
    const first = times.findIndex((time) => time > this.since);
    if (first >= 0) this.append(times.slice(first), series, first);
    const last = this.finished.at(-1)?.ended ?? 0;
    this.finished.push(...stats.finished.slice(-REQUESTS).filter((one) => one.ended > last || !this.has(one)));
    this.finished.splice(0, this.finished.length - REQUESTS);
  }

  // A series keeps the points that are known; where they are far apart, nothing was measured.
  append(times, series, first) {
    this.since = times.at(-1);
    this.times.push(...times);
    this.times.splice(0, this.times.length - SECONDS);
    for (const [name, values] of Object.entries(series)) {
      const points = this.points(name);
      times.forEach((x, i) => known(values[first + i]) && points.push({ x, y: values[first + i] }));
      const kept = points.findIndex((point) => point.x >= this.times[0]);
      points.splice(0, kept < 0 ? points.length : kept);
    }
  }

  has(one) {
    return this.finished.some((other) => other.id === one.id && other.ended === one.ended);
  }

  points(name) {
    return (this.series[name] ??= []);
  }

  // The newest value of the last `within` seconds.
  newest(name, within) {
    const last = this.points(name).at(-1);
    return last && last.x > this.since - within ? last.y : null;
  }

  used(name) {
    return this.points(name).some((point) => point.y > 0);
  }
}
