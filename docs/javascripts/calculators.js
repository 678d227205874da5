/* Calculators for the lessons. A page asks for one with
 *
 *   <div class="calculator" data-calculator="memory"></div>      or  data-calculator="data", data-calculator="sharding"
 *
 * and may set where it starts: data-parameters="7" data-stages="4". Each shows its inputs, its formulas, and what comes out.
 */
"use strict";

(() => {
  const GB = 1e9;

  const field = (name, label, start, more = {}) => ({ name, label, start, min: 0, step: "any", ...more });
  const choice = (name, label, start, options) => ({ name, label, start, options });

  const memory = {
    title: "What does training need, and what is there?",
    groups: [
      ["The model", [
        field("parameters", "Parameters (billions)", 10),
        choice("bytes", "Bytes a value", 4, [[4, "4 (float32)"], [2, "2 (bfloat16, float16)"], [8, "8 (float64)"]]),
        choice("optimizer", "Optimizer", 2, [[0, "SGD: no state"], [1, "SGD with momentum: 1 value a parameter"],
          [2, "Adam: 2 values a parameter"]]),
      ]],
      ["Activations of one micro-batch", [
        field("batch", "Samples", 1, { step: 1 }),
        field("sequence", "Positions a sample (1: no sequence)", 2048, { step: 1 }),
        field("width", "Width", 4096, { step: 1 }),
        field("layers", "Layers", 32, { step: 1 }),
        field("kept", "Values kept a layer, position and width", 2),
      ]],
      ["The machine", [
        field("device", "Memory of a device (GB)", 24),
        field("stages", "Stages (1: the whole model)", 1, { min: 1, step: 1 }),
        field("flight", "Micro-batches in flight", 1, { min: 1, step: 1 }),
      ]],
    ],
    formulas: [
      "weights = parameters × bytes",
      "gradients = parameters × bytes",
      "optimizer state = parameters × values a parameter × bytes",
      "activations = samples × positions × width × layers × values kept × bytes",
      "a stage needs (weights + gradients + state) / stages + activations / stages × in flight",
    ],
    compute: needOfMemory,
  };

  function needOfMemory(given) {
    const weights = given.parameters * 1e9 * given.bytes / GB;
    const activations =
      given.batch * given.sequence * given.width * given.layers * given.kept * given.bytes / GB;
    const of = (stages, flight) => [
      ["weights", weights / stages], ["gradients", weights / stages],
      ["optimizer state", weights * given.optimizer / stages], ["activations", activations / stages * flight],
    ];
    const whole = sum(of(1, 1)), stage = sum(of(given.stages, given.flight));
    const bars = [bar("the whole model, one micro-batch", of(1, 1), gigabytes)];
    if (given.stages > 1 || given.flight > 1) {
      bars.push(bar(`one of ${given.stages} stages, ${given.flight} in flight`, of(given.stages, given.flight), gigabytes));
    }
    return {
      bars, limit: given.device, limitWords: `there is: ${gigabytes(given.device)}`,
      numbers: { weights, activations, whole, stage },
      verdict: verdictOnMemory(given, weights, whole, stage),
    };
  }

  function verdictOnMemory(given, weights, whole, stage) {
    const there = `against ${gigabytes(given.device)}`;
    const first = `The weights alone take ${gigabytes(weights)} ${there}; training takes ${gigabytes(whole)}.`;
    const fits = stage <= given.device;
    const who = given.stages > 1 ? `Each of ${given.stages} stages needs ${gigabytes(stage)}` : `That is ${gigabytes(stage)} on one device`;
    const least = Math.ceil(stage * given.stages / given.device);
    const more = fits ? "" : ` With ${given.flight} in flight it takes at least ${least.toLocaleString("en")} stages.`;
    return { good: fits, text: `${first} ${who}: it ${fits ? "fits" : "does not fit"}.${more}` };
  }

  const data = {
    title: "How long does it take, and how long with more ranks?",
    groups: [
      ["The work", [
        field("samples", "Samples", 1000000, { step: 1 }),
        field("epochs", "Epochs", 1, { step: 1 }),
        field("rate", "Samples a second, measured on one rank", 5),
      ]],
      ["The ranks", [
        field("ranks", "Ranks", 8, { min: 1, step: 1 }),
        field("batch", "Samples a step, all ranks together", 256, { min: 1, step: 1 }),
      ]],
      ["What they tell each other, nothing of it hidden", [
        field("parameters", "Parameters (millions), a gradient of 4 bytes for each", 1000),
        field("bandwidth", "Bandwidth of a link (GB/s)", 25),
        field("latency", "Latency of a message (µs)", 10),
      ]],
    ],
    formulas: [
      "steps = samples / samples a step (rounded up) × epochs",
      "on one rank: samples × epochs / rate",
      "communication a step, a ring over n ranks: 2(n−1) × latency + 2(n−1)/n × parameters × 4 bytes / bandwidth",
      "on n ranks: samples × epochs / (rate × n) + steps × communication",
      "speed-up = time on one rank / time on n ranks;  efficiency = speed-up / n",
    ],
    compute: timeOfTraining,
  };

  function secondsOfRing(given, ranks) {
    const bytes = given.parameters * 1e6 * 4;
    return 2 * (ranks - 1) * given.latency / 1e6 + 2 * (ranks - 1) / ranks * bytes / (given.bandwidth * GB);
  }

  function timeOfTraining(given) {
    const steps = Math.ceil(given.samples / given.batch) * given.epochs;
    const of = (ranks) => [
      ["computation", given.samples * given.epochs / given.rate / ranks],
      ["communication", steps * secondsOfRing(given, ranks)],
    ];
    const { ranks } = given;
    const one = sum(of(1)), many = sum(of(ranks)), communication = secondsOfRing(given, ranks);
    const speedup = one / many, efficiency = speedup / ranks;
    const numbers = { one, many, steps, communication, speedup, efficiency };
    const bars = [bar("1 rank", of(1), duration)];
    let text = `${steps.toLocaleString("en")} steps, ${milliseconds(communication)} of communication in each. ` +
      `One rank: ${duration(one)}. ${ranks} ranks: ${duration(many)}, ` +
      `${speedup.toFixed(2)} times as fast, an efficiency of ${(100 * efficiency).toFixed(0)} %.`;
    if (ranks >= 4 && ranks % 2 === 0) {
      numbers.half = sum(of(ranks / 2));
      bars.push(bar(`${ranks / 2} ranks`, of(ranks / 2), duration));
      const gain = many < numbers.half ? "" : ", so the other half gains nothing";
      text += ` Half as many ranks: ${duration(numbers.half)}${gain}.`;
    }
    if (ranks > 1) bars.push(bar(`${ranks} ranks`, of(ranks), duration));
    return { bars, numbers, verdict: { good: speedup >= 1 && !(many >= numbers.half), text } };
  }

  const sharding = {
    title: "What does a rank hold, and what does it send?",
    groups: [
      ["The model", [
        field("parameters", "Parameters Ψ (billions)", 10),
        field("weights", "Bytes of a weight (w)", 4),
        field("gradients", "Bytes of a gradient (g)", 4),
        field("state", "Bytes of optimizer state a parameter (k)", 8),
      ]],
      ["The step", [
        field("ranks", "Ranks (p)", 8, { min: 1, step: 1 }),
        field("microbatches", "Micro-batches of each rank (m)", 1, { min: 1, step: 1 }),
        field("bucket", "A bucket of gradients (MB)", 25),
        field("device", "Memory of a device (GB)", 24),
      ]],
    ],
    formulas: [
      "data parallelism holds (w + g + k)Ψ and sends (p−1)/p × 2gΨ",
      "ZeRO-1 holds (w + g + k/p)Ψ and sends (p−1)/p × (g + w)Ψ",
      "ZeRO-2 holds (w + g/p + k/p)Ψ, and at most two buckets that are filled or on their way; it sends (p−1)/p × (mg + w)Ψ",
      "ZeRO-3 holds (w + g + k)Ψ/p, and the layers that are in use; it sends (p−1)/p × m(g + 2w)Ψ",
      "activations come on top, the same in all four: they depend on the samples of a rank",
    ],
    compute: needOfRank,
  };

  function needOfRank(given) {
    const weights = given.parameters * given.weights, gradients = given.parameters * given.gradients;
    const state = given.parameters * given.state, { ranks, microbatches } = given;
    const flight = ranks > 1 ? Math.min(2 * given.bucket / 1000, gradients) : 0;
    const wire = (copies) => (ranks - 1) / ranks * copies;
    const kinds = [
      ["Data parallelism", weights, gradients, 0, state, wire(2 * gradients)],
      ["ZeRO-1", weights, gradients, 0, state / ranks, wire(gradients + weights)],
      ["ZeRO-2", weights, gradients / ranks, flight, state / ranks, wire(microbatches * gradients + weights)],
      ["ZeRO-3", weights / ranks, gradients / ranks, 0, state / ranks, wire(microbatches * (gradients + 2 * weights))],
    ];
    const bars = kinds.map(([name, own, part, moving, kept, sent]) => bar(`${name}, sends ${gigabytes(sent)} a step`,
      [["weights", own], ["gradients", part], ["buckets", moving], ["optimizer state", kept]], gigabytes));
    const numbers = {};
    kinds.forEach((kind, level) => {
      numbers[`held${level}`] = bars[level].total;
      numbers[`sent${level}`] = kind[5];
    });
    const fits = kinds.filter((_, level) => bars[level].total <= given.device).map(([name]) => name);
    const each = kinds.map(([name], level) => `${name} ${gigabytes(bars[level].total)}`).join(", ");
    const verdict = fits.length ? `${fits[0]} fits into ${gigabytes(given.device)}` : `None fits into ${gigabytes(given.device)}`;
    return {
      bars, numbers, limit: given.device, limitWords: `there is: ${gigabytes(given.device)}`, namesOnly: true,
      verdict: { good: fits.length > 0, text: `Each of ${ranks} ranks holds: ${each}. ${verdict}, before any activations.` },
    };
  }

  const saving = {
    title: "How often to save, and what do failures cost?",
    groups: [
      ["The machines", [
        field("machines", "Machines (p)", 1000, { min: 1, step: 1 }),
        field("years", "Years from failure to failure of one machine (M₁)", 5),
      ]],
      ["The training", [
        field("cost", "A checkpoint holds the steps up for (C, seconds)", 30),
        field("start", "From a failure until it trains again (seconds)", 300),
        field("days", "The run would take, without any of this (days)", 30),
      ]],
    ],
    formulas: [
      "from failure to failure: M = M₁ / p",
      "saving every T takes C/T of the time; work that is done again takes T/(2M); starting again takes start/M",
      "least at T* = √(2CM), where the first two are equal",
      "valid while T* is much shorter than M",
    ],
    compute: costOfFailures,
  };

  function costOfFailures(given) {
    const mean = given.years * 365.25 * 86400 / given.machines;
    const best = Math.sqrt(2 * given.cost * mean);
    const part = (value) => `${significant(100 * value)} %`;
    const every = (interval, words) => bar(`${words}: every ${duration(interval)}`, [
      ["saving", given.cost / interval], ["done again", interval / (2 * mean)], ["starting", given.start / mean],
    ], part);
    const bars = [every(best / 4, "four times as often"), every(best, "at T*"), every(best * 4, "a quarter as often")];
    const lost = bars[1].total, failures = given.days * 86400 * (1 + lost) / mean;
    const valid = best < mean / 5;
    const text = `A failure every ${duration(mean)}. Save every ${duration(best)}: the run meets ` +
      `${significant(failures)} failures, and takes ${part(lost)} longer.`;
    const warning = " T* is not small beside M: in truth it is more.";
    return {
      bars, numbers: { mean, best, lost, failures }, namesOnly: true,
      verdict: { good: valid, text: valid ? text : text + warning },
    };
  }

  const CALCULATORS = { memory, data, sharding, saving };
  const COLOURS = {
    weights: "forward", gradients: "backward", "optimizer state": "weight", activations: "pair",
    computation: "forward", communication: "communication", buckets: "communication",
    saving: "forward", "done again": "backward", starting: "communication",
  };

  const sum = (parts) => parts.reduce((total, [, value]) => total + value, 0);
  const bar = (label, parts, words) => ({ label, parts, words, total: sum(parts) });

  function significant(value) {
    return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  function gigabytes(value) {
    return value >= 1 || value === 0 ? `${significant(value)} GB` : `${significant(value * 1000)} MB`;
  }

  function milliseconds(seconds) {
    return `${significant(seconds * 1000)} ms`;
  }

  function duration(seconds) {
    const units = [[86400, "days"], [3600, "hours"], [60, "minutes"], [1, "seconds"]];
    const [size, name] = units.find(([length]) => seconds >= 2 * length) ?? units[3];
    return `${significant(seconds / size)} ${name}`;
  }

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function inputFor(one, start, identity) {
    if (!one.options) {
      return element("input", { id: identity, name: one.name, type: "number", value: start, min: one.min, step: one.step,
        inputmode: "decimal", required: "" });
    }
    const select = element("select", { id: identity, name: one.name });
    for (const [value, words] of one.options) {
      const option = element("option", { value }, words);
      option.selected = String(value) === String(start);
      select.append(option);
    }
    return select;
  }

  function formFor(calculator, place, number) {
    const form = element("form", { class: "calculator-form", novalidate: "" });
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const [legend, fields] of calculator.groups) {
      const group = element("fieldset", {}, element("legend", {}, legend));
      for (const one of fields) {
        const identity = `calculator-${number}-${one.name}`;
        const input = inputFor(one, place.dataset[one.name] ?? one.start, identity);
        group.append(element("label", { for: identity }, element("span", {}, one.label), input));
      }
      form.append(group);
    }
    return form;
  }

  function rowFor(one, scale, limit) {
    const track = element("div", { class: "calculator-track" });
    for (const [name, value] of one.parts) {
      if (!(value > 0)) continue;
      const words = `${name} ${one.words(value)}`;
      const part = element("i", { class: `calculator-part is-${COLOURS[name]}`, title: words });
      part.style.width = `${100 * value / scale}%`;
      track.append(part);
    }
    if (limit !== undefined) {
      const mark = element("b", { class: "calculator-limit" });
      mark.style.left = `${100 * limit / scale}%`;
      track.append(mark);
    }
    const head = element("div", { class: "calculator-label" }, element("span", {}, one.label),
      element("strong", {}, one.words(one.total)));
    return element("div", { class: "calculator-row" }, head, track);
  }

  function legendFor(result) {
    const list = element("ul", { class: "calculator-legend" });
    const last = result.bars[result.bars.length - 1];
    for (const [name, value] of last.parts) {
      const key = element("i", { class: `calculator-part is-${COLOURS[name]}` });
      list.append(element("li", {}, key, result.namesOnly ? name : `${name} ${last.words(value)}`));
    }
    if (result.limitWords) list.append(element("li", {}, element("b", { class: "calculator-limit" }), result.limitWords));
    return list;
  }

  function valuesOf(form) {
    const values = {};
    for (const input of form.elements) {
      if (!input.name) continue;
      const value = Number(input.value);
      const low = Number(input.min || 0);
      if (input.value.trim() === "" || !Number.isFinite(value) || value < low) return [null, input];
      values[input.name] = value;
    }
    return [values, null];
  }

  function update(calculator, form, answer, place) {
    const [values, wrong] = valuesOf(form);
    for (const input of form.elements) input.toggleAttribute("aria-invalid", input === wrong);
    if (wrong) {
      const label = form.querySelector(`label[for="${wrong.id}"] span`).textContent;
      answer.replaceChildren(element("p", { class: "calculator-verdict is-bad" },
        `${label}: give a number that is at least ${wrong.min || 0}.`));
      return;
    }
    const result = calculator.compute(values);
    if (Object.values(result.numbers).some((number) => !Number.isFinite(number))) {
      const words = "These numbers give no answer: one of them is 0 where something is divided by it.";
      answer.replaceChildren(element("p", { class: "calculator-verdict is-bad" }, words));
      return;
    }
    for (const [name, number] of Object.entries(result.numbers)) place.dataset[`result${name}`] = number;
    const scale = Math.max(...result.bars.map((one) => one.total), (result.limit ?? 0) * 1.02) || 1;
    answer.replaceChildren(
      ...result.bars.map((one) => rowFor(one, scale, result.limit)), legendFor(result),
      element("p", { class: `calculator-verdict ${result.verdict.good ? "is-good" : "is-bad"}`, "aria-live": "polite" },
        result.verdict.text));
  }

  function build(place, number) {
    const calculator = CALCULATORS[place.dataset.calculator];
    if (!calculator) {
      place.textContent = `There is no calculator ${place.dataset.calculator}: only ${Object.keys(CALCULATORS).join(", ")}.`;
      return;
    }
    const form = formFor(calculator, place, number);
    const answer = element("div", { class: "calculator-answer" });
    const formulas = element("div", { class: "calculator-formulas" }, element("p", {}, "How it is computed"),
      element("ul", {}, ...calculator.formulas.map((line) => element("li", {}, line))));
    place.replaceChildren(element("p", { class: "calculator-title" }, calculator.title), form, answer, formulas);
    form.addEventListener("input", () => update(calculator, form, answer, place));
    update(calculator, form, answer, place);
  }

  const start = () => document.querySelectorAll("[data-calculator]").forEach(build);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
