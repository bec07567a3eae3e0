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
  $("workers").replaceChildren(...state.status.workers.map(workerRow));
  const requests = state.requests.map(requestItem);
  $("requests").replaceChildren(...(requests.length ? requests.reverse() : [make("li", { text: "none" })]));
  $("decisions").replaceChildren(...state.decisions.map(decisionRow));
  $("tenants").replaceChildren(...state.tenants.map((each) => row(each.name, each.weight, each.num_queued, each.num_active)));
}

function showDiagnosis({ headline, findings }, alarms) {
  $("headline").textContent = headline;
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

function workerRow(worker) {
  const state = make("span", { text: worker.slowness ? `${worker.state}, slow` : worker.state });
  state.className = worker.state === "ready" && !worker.slowness ? "" : "bad";
  const status = worker.status;
  if (!status) return row(worker.worker_id, state, "–", "–", "–", "–", "–", "–");
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
  const pagesText = `${status.num_used_blocks} used, ${status.num_cached_blocks} reusable of ${pages}`;
  return row(
    worker.worker_id, state, status.load.num_running, status.load.num_waiting, batch ? batch.toFixed(1) : "–", bars,
    make("div", { text: pagesText }, meter([["used", 0, used], ["cached", used, cached]], pagesText)),
    mib(Number(status.kv_bytes_sent) + Number(status.kv_bytes_received)),
  );
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

function decisionRow(decision) {
  const { plan, outcome } = decision;
  const workers = [plan.prefill_worker_id, plan.decode_worker_id].filter(Boolean).join(" → ");
  const costs = decision.candidates.slice(0, 3)
    .map((each) => `${[each.prefill_worker_id, each.decode_worker_id].filter(Boolean).join(" → ")} ${Number(each.cost).toPrecision(3)}`);
  return row(
    seconds(decision.age_s), decision.request_id, decision.num_tokens, `${workers} (${plan.reason})`,
    `${plan.predicted_cached_tokens}, ${outcome.num_cached_tokens ?? "–"}`,
    `${seconds(plan.predicted_ttft_s || null)}, ${seconds(outcome.ttft_s)}`,
    costs.join("; "),
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
  const workers = [plan.prefill_worker_id, plan.decode_worker_id].filter(Boolean).join(" → ");
  $("report").replaceChildren(...terms([
    ["request", request_id],
    ["plan", `${plan.kind} ${workers} (${plan.reason})`],
    ["cached", `${usage.num_cached_tokens} of ${usage.num_prompt_tokens} tokens`],
    ["handoff", `${mib(transfer.kv_bytes)} in ${seconds(transfer.transfer_s)} by ${transfer.transport || "no transport"}`],
    ["first token", `${seconds(timings.ttft_s)}, then one each ${seconds(timings.mean_itl_s)}`],
  ]));
}

watch();
