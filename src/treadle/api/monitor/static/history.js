// What the page remembers: a bounded number of seconds and of finished requests, whatever the server did.

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

  append(times, series, first) {
    for (const [name, values] of Object.entries(series)) {
      this.series[name] ??= this.times.map((x) => ({ x, y: null }));
      const points = this.series[name];
      times.forEach((x, i) => points.push({ x, y: values[first + i] }));
      points.splice(0, points.length - SECONDS);
    }
    this.times.push(...times);
    this.times.splice(0, this.times.length - SECONDS);
    this.since = this.times.at(-1);
  }

  has(one) {
    return this.finished.some((known) => known.id === one.id && known.ended === one.ended);
  }

  points(name) {
    return (this.series[name] ??= this.times.map((x) => ({ x, y: null })));
  }

  // The newest value that is known, of the last `within` seconds.
  newest(name, within = SECONDS) {
    const points = this.points(name);
    for (let i = points.length - 1; i >= 0 && points[i].x > this.since - within; i--) {
      if (points[i].y !== null) return points[i].y;
    }
    return null;
  }

  used(name) {
    return name in this.series && this.series[name].some((point) => point.y !== null && point.y > 0);
  }
}
