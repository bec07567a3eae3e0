// The live page: one stream of states in, text and bars out. Every text is set as text, never as markup.

const WINDOW_S = 30;
const STEPS_WINDOW_S = 60;
const RETRY_MS = 2000;
const ENDS = new Set(["finished", "failed", "cancelled"]);

const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") ?? "";

function make(tag, { text, className, title, style } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (title) element.title = title;
  Object.assign(element.style, style ?? {});
  element.append(...children);
  return element;
}

const seconds = (s) => s === undefined || s === null ? "–" : s < 1 ? `${(1000 * s).toFixed(s < 0.1 ? 1 : 0)} ms` : `${s.toFixed(2)} s`;
const percent = (share) => `${Math.round(100 * share)} %`;
const uptime = (s) => s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
const mib = (bytes) => `${(Number(bytes) / 2 ** 20).toFixed(1)} MiB`;
const row = (...cells) => make("tr", {}, ...cells.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", { text: cell }))));
const terms = (pairs) => pairs.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]);

// ── the stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// Yield the data of each server-sent event. `EventSource` could not send a key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // else a reader that fails leaves its stream open, and takes a watcher's place
  }
}

function tell(text, isBad) {
  $("connection").textContent = text;
  $("connection").className = isBad ? "bad" : "";
}

async function watch() {
  for (;;) {
    try {
      const response = await fetch("cluster", { headers: { accept: "text/event-stream", ...headers() } });
      const isRefused = response.status === 401 || response.status === 403;
      $("key-form").hidden = !isRefused;
      if (isRefused) {
        tell("this page is for operators", true);
        await new Promise((resolve) => $("key-form").addEventListener("submit", resolve, { once: true }));
        continue;
      }
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const data of events(response)) {
        const state = JSON.parse(data);
        if (state.error) throw new Error(state.error.message);
        show(state);
        tell(`live, ${new Date().toLocaleTimeString()}`, false);
      }
      tell("the router has ended the stream; trying again", true);
    } catch (error) {
      tell(`no connection to the router (${error.message}); trying again`, true);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
});

// ── what it shows ──────────────────────────────────────────────────────────────────────────────────────────────────

function show(state) {
  $("model").textContent = `${state.model ?? "no model yet"} · ${state.version}`;
  showDiagnosis(state.diagnosis, state.status.router.alarms);
  showRouter(state.status.router);
  showHistory(state.history);
  $("walls").replaceChildren(...state.diagnosis.walls.map(wallsRow));
  showRoofline(state.status.workers);
  $("workers").replaceChildren(...state.status.workers.map(workerRow));
  showPrefixes(state.status.router.hot_prefixes, state.status.workers);
  showPlanner(state.status.planner);
  const requests = state.requests.map(requestItem);
  $("requests").replaceChildren(...(requests.length ? requests.reverse() : [make("li", { text: "none" })]));
  showDecisions(state.decisions);
  $("tenants").replaceChildren(...state.tenants.map((each) => row(each.name, each.weight, each.num_queued, each.num_active)));
}

function showDiagnosis({ headline, waiting, findings }, alarms) {
  $("headline").textContent = waiting ? `${headline}; ${waiting}` : headline;
  if (!findings.length) $("headline").textContent += ". Nothing costs much time.";
  $("findings").replaceChildren(...findings.map((finding) => {
    const changes = finding.changes.map((change) => make("li", { text: change }));
    const text = `${finding.cause} (${seconds(finding.lost_s)} a request): ${finding.text}`;
    return make("li", { text }, ...(changes.length ? [make("ul", {}, ...changes)] : []));
  }));
  $("alarms").replaceChildren(...alarms.map((alarm) => make("li", { text: alarm })));
}

function showRouter(router) {
  $("router").replaceChildren(...terms([
    ["policy", router.policy],
    ["queued, active", `${router.num_queued}, ${router.num_active}`],
    ["completed", router.num_completed],
    ["failed, cancelled", `${router.num_failed}, ${router.num_cancelled}`],
    ["refused", router.num_refused],
    ["planned again, moved", `${router.num_replans}, ${router.num_moves}`],
    ["blocks in the index", router.num_index_blocks],
  ]));
}

function meter(parts, title) {
  return make("div", { className: "meter", title }, ...parts.map(([className, begin, share]) =>
    make("span", { className, style: { left: `${100 * begin}%`, width: `${100 * Math.min(1 - begin, share)}%` } })));
}

// What pulls of each transport reach, beside the most that it moved between pages of the worker's host at its start.
function links(status) {
  const rate = (value) => Number((Number(value) / 1e9).toPrecision(2));
  return (status.link_rates ?? []).filter((link) => link.bytes_per_s).map((link) => {
    const most = link.most_bytes_per_s ? ` of ${rate(link.most_bytes_per_s)}` : "";
    const name = String(link.transport).replace("KV_TRANSPORT_", "").toLowerCase();
    return make("div", { className: "legend", text: `${name} ${rate(link.bytes_per_s)}${most} GB/s` });
  });
}

function workerRow(worker) {
  const state = make("span", { text: worker.slowness ? `${worker.state}, slow` : worker.state });
  state.className = worker.state === "ready" && !worker.slowness ? "" : "bad";
  const status = worker.status;
  if (!status) return row(worker.worker_id, state, "–", "–", "–", "–", "–", "–", "–");
  const steps = (status.recent_steps ?? []).find((each) => each.window_s === STEPS_WINDOW_S);
  const share = (value) => (steps && steps.covered_s ? value / steps.covered_s : 0);
  const shares = steps ? {
    busy: share(steps.prefill_s + steps.decode_s),
    memory: share(steps.prefill_memory_s + steps.decode_memory_s),
    compute: share(steps.prefill_compute_s + steps.decode_compute_s),
  } : { busy: 0, memory: 0, compute: 0 };
  const batch = steps && Number(steps.num_decode_steps) ? Number(steps.num_decodes) / Number(steps.num_decode_steps) : 0;
  const text = Object.entries(shares).map(([name, value]) => `${name} ${percent(value)}`).join(", ");
  const bars = make("div", {}, ...Object.entries(shares).map(([name, value]) => meter([[name, 0, value]], text)));
  bars.setAttribute("aria-label", text);
  bars.setAttribute("role", "img");
  const pages = status.load.num_blocks, used = status.num_used_blocks / pages, cached = status.num_cached_blocks / pages;
  const pagesText = `${status.num_used_blocks} used, ${status.num_cached_blocks} reusable of ${pages}`
    + (Number(status.load.max_tier_blocks) ? ` · ${status.load.num_tier_blocks} of ${status.load.max_tier_blocks} in tiers` : "");
  return row(
    worker.worker_id, state, status.load.num_running, status.load.num_waiting, batch ? batch.toFixed(1) : "–", bars,
    make("div", { text: pagesText }, meter([["used", 0, used], ["cached", used, cached]], pagesText)),
    make("div", { text: mib(Number(status.kv_bytes_sent) + Number(status.kv_bytes_received)) }, ...links(status)),
    uptime(status.uptime_s),
  );
}

const WALLS = ["memory", "compute", "link", "overhead", "waiting"];

function wallsRow(walls) {
  const isMeasured = walls.memory || walls.compute;
  const cells = ["busy", ...WALLS].map((name) => {
    const isKnown = isMeasured || (name !== "memory" && name !== "compute");
    return make("div", { text: isKnown ? percent(walls[name]) : "–" }, meter([[name, 0, walls[name]]]));
  });
  const binds = { compute: "arithmetic", link: "links", waiting: "no work" }[walls.binds] ?? walls.binds;
  return row(walls.pool, `${walls.window_s / 60} min`, ...cells, binds || "no steps yet");
}

const draw = (tag, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

const HISTORY_S = 900;
const BREAK_S = 12; // a line ends where more than one point is missing
const CHARTS = [
  { name: "Output tokens per second", lines: { output_tokens_per_s: "amount" }, form: (value) => Number(value.toPrecision(3)) },
  { name: "Answers per second", lines: { requests_per_s: "amount" }, form: (value) => Number(value.toPrecision(3)) },
  { name: "Time to first token", lines: { ttft_p50_s: "median", ttft_p95_s: "slow" }, form: seconds },
  { name: "Time per output token", lines: { tpot_p50_s: "median", tpot_p95_s: "slow" }, form: seconds },
];

const showHistory = (history) => $("history").replaceChildren(...CHARTS.map((each) => chart(each, history)));

// One measure over time, from 0 to a round number above the largest value.
function chart({ name, lines, form }, history) {
  const [left, right, top, bottom] = [52, 292, 8, 112];
  const known = history.age_s.map((age, index) => ({ age, index }))
    .filter(({ age, index }) => age <= HISTORY_S && Object.keys(lines).every((line) => history[line][index] !== null));
  const most = Math.max(0, ...known.flatMap(({ index }) => Object.keys(lines).map((line) => history[line][index])));
  const power = 10 ** Math.floor(Math.log10(most || 1));
  const ceiling = [1, 2, 5, 10].map((step) => step * power).find((each) => each >= most);
  const x = (age) => right - (age / HISTORY_S) * (right - left);
  const y = (value) => bottom - (value / ceiling) * (bottom - top);
  const latest = known.length ? Object.keys(lines).map((line) => form(history[line][known.at(-1).index])).join(", ") : "none yet";
  const svg = draw("svg", { viewBox: "0 0 300 130", role: "img", "aria-label": `${name}: ${latest}` });
  for (const value of [0, ceiling / 2, ceiling]) {
    svg.append(draw("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }));
    if (known.length) svg.append(draw("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" }, value ? form(value) : "0"));
  }
  for (const minutes of [15, 10, 5, 0]) {
    const text = minutes ? `−${minutes} min` : "now";
    svg.append(draw("text", { x: x(60 * minutes), y: bottom + 13, "text-anchor": minutes ? "middle" : "end" }, text));
  }
  for (const [line, className] of Object.entries(lines)) {
    const steps = known.map(({ age, index }, position) => {
      const isNext = position && known[position - 1].age - age < BREAK_S;
      return `${isNext ? "L" : "M"}${x(age).toFixed(1)} ${y(history[line][index]).toFixed(1)}${isNext ? "" : "h0"}`;
    });
    svg.append(draw("path", { class: className, d: steps.join("") }));
  }
  if (!known.length) {
    const text = history.age_s.length ? "no answer has ended" : "the first point comes after 5 s";
    svg.append(draw("text", { x: (left + right) / 2, y: (top + bottom) / 2 - 8, "text-anchor": "middle" }, text));
  }
  return make("figure", {}, make("figcaption", { text: `${name}: ${latest}` }), svg);
}

// The mean steps of the last hour under one roof: intensity in multiples of each device's ridge, speed in shares of its
// matrix rate.
function rooflinePoints(workers) {
  return workers.filter((worker) => worker.status?.device).flatMap((worker) => {
    const steps = worker.status.recent_steps.at(-1);
    return ["prefill", "decode"].filter((kind) => Number(steps[`num_${kind}_steps`])).map((kind) => {
      const [memory, compute, taken] = ["memory_s", "compute_s", "s"].map((name) => steps[`${kind}_${name}`]);
      return { name: worker.worker_id, kind, intensity: compute / memory, speed: compute / taken, bound: Math.max(memory, compute) / taken };
    });
  });
}

function showRoofline(workers) {
  const points = rooflinePoints(workers);
  const [left, right, top, bottom] = [34, 312, 8, 172];
  const decades = 3, up = 2; // from 1/1000 to 1, and an intensity of up to 100 ridges
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const x = (intensity) => left + ((clamp(Math.log10(intensity), -decades, up) + decades) / (decades + up)) * (right - left);
  const y = (speed) => bottom - ((clamp(Math.log10(speed), -decades, 0.2) + decades) / (decades + 0.2)) * (bottom - top);
  const drawn = [draw("path", { class: "roof", d: `M${x(0.001)} ${y(0.001)} L${x(1)} ${y(1)} L${x(100)} ${y(1)}` })];
  for (const power of [-3, -2, -1, 0]) {
    const value = 10 ** power, label = power === 0 ? "1" : `1/${10 ** -power}`;
    drawn.push(draw("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }));
    if (power > -decades) drawn.push(draw("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" }, label));
    drawn.push(draw("text", { x: x(value), y: bottom + 11, "text-anchor": "middle" }, label));
  }
  drawn.push(draw("text", { x: right, y: bottom + 24, "text-anchor": "end" }, "arithmetic per byte, in multiples of the ridge"));
  for (const { name, kind, intensity, speed } of points.slice(0, 64)) {
    const mark = draw("circle", { class: kind, cx: x(intensity), cy: y(speed), r: 4 });
    mark.append(draw("title", {}, `${kind} on ${name}`));
    drawn.push(mark);
  }
  $("roofline").replaceChildren(...drawn);
  $("roofline").style.display = points.length ? "" : "none";
  const texts = points.map(({ name, kind, bound }) => `${kind} on ${name} ${percent(bound)}`);
  $("roofline-text").textContent = points.length
    ? `Speed in shares of the matrix rate. Of the bound: ${texts.slice(0, 8).join(", ")}.`
    : "No worker has measured its device and run a step.";
}

function showPrefixes(prefixes, workers) {
  const shown = workers.slice(0, 16).map((worker) => worker.worker_id);
  const heads = ["prefix", "requests", ...shown];
  $("prefix-workers").replaceChildren(...heads.map((text) => make("th", { text })));
  if (!prefixes.length) {
    const cell = make("td", { text: "none yet" });
    cell.colSpan = heads.length;
    $("prefixes").replaceChildren(make("tr", {}, cell));
    return;
  }
  $("prefixes").replaceChildren(...prefixes.map((prefix) => {
    const held = Object.fromEntries(prefix.holders.map((each) => [each.worker_id, each.num_blocks]));
    const cells = shown.map((worker) => {
      const count = held[worker] ?? 0;
      const shade = Math.round(45 * Math.min(1, count / prefix.num_blocks));
      const style = { background: `color-mix(in srgb, var(--decoding) ${shade}%, transparent)` };
      return make("td", { className: "cell", text: count ? `${count} of ${prefix.num_blocks}` : "–", style });
    });
    const name = make("td", {}, make("code", { text: prefix.digest }));
    return make("tr", {}, name, make("td", { text: `${prefix.num_requests.toFixed(1)}, ${seconds(prefix.age_s)} ago` }), ...cells);
  }));
}

const sizes = (plan) => ["prefill", "decode"].map((pool) => {
  const { present, wanted } = plan[pool];
  return `${pool} ${present}${present === wanted ? "" : ` → ${wanted}`}`;
}).join(", ");

function showPlanner(planner) {
  const plan = planner?.latest;
  const mode = planner ? `Mode ${planner.mode}, every ${planner.interval_s} s` : "";
  if (!planner) $("plan").textContent = "No controller has told this router of a planner.";
  else if (planner.mode === "off") $("plan").textContent = "The planner is off (planner.mode in serving.yaml).";
  else if (!plan) $("plan").textContent = `${mode}; no plan yet.`;
  else $("plan").textContent = `${mode}. ${seconds(plan.age_s)} ago: ${sizes(plan)}; ${plan.reason}${plan.outcome ? ` (${plan.outcome})` : ""}`;
  $("plan-terms").replaceChildren(...(plan?.terms ?? []).map(({ name, value }) =>
    make("div", {}, make("dt", { text: name }), make("dd", { text: Number(value.toPrecision(3)) }))));
  $("plan-changes").replaceChildren(...(planner?.changes ?? []).map((each) =>
    make("li", { text: `${seconds(each.age_s)} ago: ${sizes(each)}; ${each.reason}${each.outcome ? ` (${each.outcome})` : ""}` })));
}

function requestItem(request) {
  const place = (age) => Math.max(0, Math.min(1, (WINDOW_S - age) / WINDOW_S));
  const spans = request.stages.flatMap(([state, age], position) => {
    if (ENDS.has(state)) return [];
    const end = position + 1 < request.stages.length ? request.stages[position + 1][1] : 0;
    const [left, right] = [place(age), place(end)];
    if (right <= left) return [];
    return [make("span", { className: state, title: `${state} ${seconds(age - end)}`, style: { left: `${100 * left}%`, width: `${100 * (right - left)}%` } })];
  });
  const [last] = request.stages.at(-1);
  const workers = [request.prefill_worker_id, request.decode_worker_id].filter(Boolean).join(" → ");
  const text = `${last} · ${request.num_prompt_tokens}+${request.num_output_tokens} · ${workers || "no plan"}`;
  return make("li", {}, make("span", { text, title: `${request.request_id} of ${request.tenant}, ${request.num_cached_tokens} cached` }),
    make("div", { className: "track" }, ...spans));
}

const openDecisions = new Set();

function showDecisions(decisions) {
  const focused = document.activeElement?.closest?.("details")?.dataset.decision;
  $("decisions").replaceChildren(...decisions.map(decisionRow));
  for (const details of $("decisions").querySelectorAll("details")) {
    if (details.dataset.decision === focused) details.firstChild.focus({ preventScroll: true });
  }
}

const workersOf = (plan) => [plan.prefill_worker_id, plan.decode_worker_id].filter(Boolean).join(" → ");

// The cost of each option, and on demand the terms that it is the sum of.
function costs(decision) {
  const options = decision.candidates.slice(0, 3).map((each) => `${workersOf(each)} ${Number(each.cost).toPrecision(3)}`);
  if (!options.length) return make("span", { text: "–" });
  const lines = decision.candidates.map((each) => {
    const parts = Object.entries(each.terms).map(([name, value]) => `${name} ${Number(value.toPrecision(3))}`);
    return make("li", { text: `${workersOf(each)} ${Number(each.cost).toPrecision(3)}: ${parts.join(", ")}` });
  });
  const details = make("details", {}, make("summary", { text: options.join("; ") }), make("ul", {}, ...lines));
  const name = details.dataset.decision = `${decision.request_id} ${decision.attempt}`;
  details.open = openDecisions.has(name);
  details.addEventListener("toggle", () => (details.open ? openDecisions.add(name) : openDecisions.delete(name)));
  return details;
}

function decisionRow(decision) {
  const { plan, outcome } = decision;
  return row(
    seconds(decision.age_s), make("code", { text: decision.request_id }), decision.num_tokens,
    make("div", { className: "words" }, make("b", { text: workersOf(plan) }), ` ${plan.reason}`), costs(decision),
    `${plan.predicted_cached_tokens}, ${outcome.num_cached_tokens ?? "–"}`,
    `${seconds(plan.predicted_ttft_s || null)}, ${seconds(outcome.ttft_s)}`,
  );
}

// ── chat ───────────────────────────────────────────────────────────────────────────────────────────────────────────

$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("chat").querySelector("button");
  button.disabled = true;
  $("answer").textContent = "";
  $("report").replaceChildren();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        messages: [{ role: "user", content: $("prompt").value }],
        stream: true,
        stream_options: { include_usage: true },
        kvrelay: { report: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      $("answer").textContent += part.choices?.[0]?.delta?.content ?? "";
      if (part.kvrelay) report(part.kvrelay.requests[0]);
    }
  } catch (error) {
    $("answer").textContent += `\n${error.message}`;
  } finally {
    button.disabled = false;
  }
});

function report({ request_id, plans, usage, timings, transfer }) {
  const plan = plans.at(-1);
  $("report").replaceChildren(...terms([
    ["request", request_id],
    ["plan", `${plan.kind} ${workersOf(plan)} (${plan.reason})`],
    ["cached", `${usage.num_cached_tokens} of ${usage.num_prompt_tokens} tokens`],
    ["handoff", `${mib(transfer.kv_bytes)} in ${seconds(transfer.transfer_s)} by ${transfer.transport || "no transport"}`],
    ["first token", `${seconds(timings.ttft_s)}, then one each ${seconds(timings.tpot_s)}`],
  ]));
}

watch();
