// What is drawn. A line names a series of the history, or gives a level from the newest snapshot.

import { bytes, number, seconds, share, speed } from "./format.js";

const SPARSE = 60; // seconds without a value over which a line of rare values still goes on

export const PLOTS = [
  {
    id: "ttft", title: "Time to first token", form: seconds,
    lines: [{ series: "ttft_s", name: "median", colour: 1, rare: SPARSE }],
  },
  {
    id: "gaps", title: "Time between tokens", form: seconds,
    lines: [
      { series: "inter_token_p50_s", name: "p50", colour: 1, rare: 5 },
      { series: "inter_token_p95_s", name: "p95", colour: 2, rare: 5 },
    ],
  },
  {
    id: "prefill", title: "Prefill", form: speed, whole: true,
    lines: [{ series: "prefill_tokens_per_s", name: "tokens computed per second", colour: 3, filled: true }],
  },
  {
    id: "decode", title: "Decode", form: speed, whole: true,
    lines: [{ series: "decode_tokens_per_s", name: "tokens made per second", colour: 1, filled: true }],
  },
  { id: "prompts", title: "Tokens per prompt", bars: true, form: number },
  {
    id: "load", title: "Batch and queue", form: number, whole: true,
    lines: [
      { series: "running", name: "running", colour: 1, stepped: true },
      { series: "waiting", name: "waiting", colour: 2, stepped: true },
      { series: "batch", name: "rows per step", colour: 3, rare: 5 },
    ],
  },
  {
    id: "cache", title: "Prefix cache", form: bytes,
    level: { of: (stats) => stats.cache?.budget_bytes, name: "budget" },
    lines: [{ series: "cache_bytes", name: "held", colour: 4, filled: true }],
  },
  {
    id: "memory", title: "Memory", form: bytes,
    level: { of: (stats) => stats.memory?.limit_bytes, name: "limit" },
    lines: [{ series: "active_bytes", name: "in use", colour: 3, filled: true }],
  },
  {
    id: "acceptance", title: "Drafts accepted", form: share, top: 1, wanted: (history) => history.used("acceptance"),
    lines: [{ series: "acceptance", name: "of the drafted tokens", colour: 2, rare: SPARSE }],
  },
  {
    id: "vision", title: "Image encoding", form: seconds, wanted: (history) => history.used("vision_s"),
    lines: [{ series: "vision_s", name: "time per second", colour: 4, rare: SPARSE }],
  },
];
