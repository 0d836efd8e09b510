// The last minutes, from differences between snapshots: rates, and percentiles from histograms.

const KEEP_S = 300;
export const WINDOW_S = 15; // of each percentile in a plot
export const SPAN_S = KEEP_S;

export class History {
  constructor() {
    this.steps = [];
    this.last = null;
  }

  // Takes a snapshot; what lies between it and the one before becomes a step. A router that started again, or a worker
  // that gave no answer, begins anew: differences to what it counted before mean nothing.
  add(snapshot) {
    const before = this.last;
    this.last = snapshot;
    if (!before || snapshot.at <= before.at || isAnew(before, snapshot)) return;
    const [now, then] = [snapshot.work, before.work];
    this.steps.push({
      at: snapshot.at,
      seconds: snapshot.at - before.at,
      tokens: now.num_generation_tokens - then.num_generation_tokens,
      promptTokens: now.num_prompt_tokens - then.num_prompt_tokens,
      nodeTokens: grown(then.num_tokens_by_node, now.num_tokens_by_node),
      flows: flowsBetween(then.flows, now.flows),
      ttft: minus(now.first_token_s, then.first_token_s),
      itl: minus(now.inter_token_s, then.inter_token_s),
    });
    this.steps = this.steps.filter((step) => step.at > snapshot.at - KEEP_S);
  }

  // Sum of the steps in the `span` seconds before `at`.
  over(span, at = this.last?.at ?? 0) {
    return this.steps.filter((step) => step.at > at - span && step.at <= at);
  }

  // When the oldest step ended, in seconds before now: not above 0.
  get age() {
    return this.steps.length ? this.steps[0].at - this.last.at : 0;
  }

  rate(name, span = 3) {
    const steps = this.over(span);
    const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
    return seconds ? steps.reduce((sum, step) => sum + step[name], 0) / seconds : 0;
  }

  // Bytes a second by "source target".
  flowRates(span = 3) {
    const steps = this.over(span);
    const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
    const rates = new Map();
    for (const step of steps) {
      for (const [pair, bytes] of step.flows) rates.set(pair, (rates.get(pair) ?? 0) + bytes / seconds);
    }
    return rates;
  }

  // Tokens a second by incarnation: of prompts, and generated.
  tokenRates(span = 3) {
    const steps = this.over(span);
    const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
    const rates = new Map();
    for (const step of steps) {
      for (const [node, tokens] of step.nodeTokens) rates.set(node, (rates.get(node) ?? 0) + tokens / seconds);
    }
    return rates;
  }

  // NaN if there was no observation.
  quantile(name, share, span, at) {
    return quantile(sum(this.over(span, at).map((step) => step[name])), share);
  }

  // [[seconds before now, value], ...]
  series(name, share) {
    const now = this.last?.at ?? 0;
    return this.steps.map((step) => [step.at - now, this.quantile(name, share, WINDOW_S, step.at)]);
  }
}

function isAnew(before, now) {
  return (
    before.num_workers_answered !== now.num_workers_answered ||
    now.work.num_prompt_tokens < before.work.num_prompt_tokens ||
    now.work.num_generation_tokens < before.work.num_generation_tokens ||
    fell(now.work.first_token_s, before.work.first_token_s) ||
    fell(now.work.inter_token_s, before.work.inter_token_s)
  );
}

// Of several workers, one may have begun again while the others made the sums grow.
const fell = (now, before) => before.counts.some((count, i) => (now.counts[i] ?? 0) < count);

function minus(now, before) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - (before.counts[i] ?? 0)) };
}

function flowsBetween(before, now) {
  const totals = new Map(before.map((flow) => [`${flow.source} ${flow.target}`, flow.num_bytes]));
  const grown = now.map((flow) => {
    const pair = `${flow.source} ${flow.target}`;
    return [pair, flow.num_bytes - (totals.get(pair) ?? 0)];
  });
  return grown.filter(([, bytes]) => bytes > 0);
}

// By node. One that was away has been counted from 0 again.
function grown(before, now) {
  return Object.entries(now).map(([node, tokens]) => [node, Math.max(0, tokens - (before[node] ?? 0))]);
}

function sum(histograms) {
  const bounds = histograms.at(-1)?.bounds ?? [];
  const counts = bounds.map(() => 0).concat(0);
  for (const histogram of histograms) histogram.counts.forEach((count, i) => (counts[i] += count));
  return { bounds, counts };
}

// As Prometheus' histogram_quantile: linear within a bucket.
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((all, count) => all + count, 0);
  if (!total) return NaN;
  let rank = share * total;
  for (let i = 0; i < bounds.length; i += 1) {
    const low = i ? bounds[i - 1] : 0;
    if (rank <= counts[i] && counts[i]) return low + (bounds[i] - low) * (rank / counts[i]);
    rank -= counts[i];
  }
  return bounds.at(-1);
}
