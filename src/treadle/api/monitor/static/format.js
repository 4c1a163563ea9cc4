// Numbers as people read them: always with a unit, never with more digits than they mean.

const NONE = "–";
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const or = (form) => (value) => (known(value) ? form(value) : NONE);

export const count = or((value) => (value < 100_000 ? plain.format(value) : short.format(value)));

export const number = or((value) => (value >= 100 ? plain.format(value) : trim(value.toFixed(1))));

export const speed = or((value) => `${number(value)} tok/s`);

export const share = or((value) => `${(100 * value).toFixed(value > 0 && value < 0.01 ? 1 : 0)} %`);

export const seconds = or((value) => {
  if (value >= 10) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${trim(value.toFixed(2))} s`;
  const ms = 1000 * value;
  return `${ms >= 10 ? ms.toFixed(0) : trim(ms.toFixed(1))} ms`;
});

export const bytes = or((value) => {
  if (value >= 1e8) return `${trim((value / 1e9).toFixed(2))} GB`;
  if (value >= 1e5) return `${trim((value / 1e6).toFixed(1))} MB`;
  return value === 0 ? "0 MB" : `${trim((value / 1e3).toFixed(1))} kB`;
});

// The two largest units.
export const duration = or((value) => {
  const whole = Math.floor(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
});

const clocks = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const exact = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const clock = (unix) => clocks.format(1000 * unix);

export const moment = (unix) => exact.format(1000 * unix);

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
