/* The explorer: one stochastic matrix, its pairs of rows, and whether the layerwise bound is tight.
   Plain JavaScript, no library, no request. Definitions as in dobnb/equality.py; tests/test_explorer.py holds the
   numbers against it. */
"use strict";

(() => {
  const ATTAINS = 1e-12; // a pair attains kappa when it is within this of the largest, as in the package
  const ROW_SUM = 1e-6; // rows typed in may miss 1 by this much, and are then divided by their sum
  const MOST = 12; // tokens
  const STEPS = 100; // in 1, of a dragged entry and of the arrow keys
  const DENOMINATOR = 20000; // an entry that a move leaves within SNAP of a fraction, none larger below, is that fraction
  const SNAP = 1e-13;

  // Mathematics ------------------------------------------------------------------------------------------------------

  function totalVariation(p, q) {
    let sum = 0;
    for (let k = 0; k < p.length; k += 1) sum += Math.abs(p[k] - q[k]);
    return sum / 2;
  }

  function pairsOf(n) {
    const pairs = [];
    for (let i = 0; i < n; i += 1) for (let j = i + 1; j < n; j += 1) pairs.push([i, j]);
    return pairs;
  }

  function factor(A, alpha) {
    return A.map((row, i) => row.map((entry, k) => (1 - alpha) * entry + (i === k ? alpha : 0)));
  }

  function report(A, alpha) {
    const B = factor(A, alpha);
    const pairs = pairsOf(A.length).map(([i, j]) => ({
      i,
      j,
      tv: totalVariation(A[i], A[j]),
      factorTv: totalVariation(B[i], B[j]),
      slack: Math.min(A[i][i] - A[j][i], A[j][j] - A[i][j]),
    }));
    const kappa = Math.max(...pairs.map((pair) => pair.tv));
    const factorKappa = Math.max(...pairs.map((pair) => pair.factorTv)); // from B itself, not from the identity
    for (const pair of pairs) pair.attains = pair.tv >= kappa - ATTAINS;
    const attaining = pairs.filter((pair) => pair.attains);
    const witness = attaining.find((pair) => pair.slack >= 0);
    const holds = witness !== undefined;
    const bound = alpha + (1 - alpha) * kappa;
    const gap = holds ? 0 : Math.max(0, bound - factorKappa);
    const margin = Math.min(...pairs.map((pair) => Math.max(holds ? pair.slack : -pair.slack, kappa - pair.tv)));
    const pair = witness ?? attaining[0];
    return {
      kappa, factorKappa, bound, gap, holds, margin, pairs, pair,
      relativeGap: kappa > 0 ? gap / ((1 - alpha) * kappa) : NaN,
      attaining: attaining.length,
    };
  }

  // The fraction that a number is but for rounding, else the number: two ways to one fraction end at one number, a tie.
  function snapped(number) {
    let [p, q, formerP, formerQ, rest] = [Math.floor(number), 1, 1, 0, number];
    while (Math.abs(number - p / q) > SNAP) {
      rest = 1 / (rest - Math.floor(rest)); // the next term of the continued fraction
      const term = Math.floor(rest);
      [p, q, formerP, formerQ] = [term * p + formerP, term * q + formerQ, p, q];
      if (!(q <= DENOMINATOR)) return number;
    }
    return p / q;
  }

  // One entry takes the value, to the nearest hundredth, and the others of its row keep their proportions.
  function withEntry(A, i, k, value) {
    const entry = Math.round(clamp(value, 0, 1) * STEPS) / STEPS;
    const rest = A[i].reduce((sum, other, m) => (m === k ? sum : sum + other), 0);
    return A.map((row, r) => {
      if (r !== i) return row;
      return row.map((other, m) => {
        if (m === k) return entry;
        return snapped(rest > 0 ? (other * (1 - entry)) / rest : (1 - entry) / (row.length - 1));
      });
    });
  }

  function parseNumber(word) {
    const fraction = word.split("/");
    const numbers = fraction.map((part) => {
      const number = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(part) ? Number(part) : NaN;
      return number >= 0 ? Math.abs(number) : NaN; // -0 is 0
    });
    return numbers.length === 1 ? numbers[0] : numbers.length === 2 ? numbers[0] / numbers[1] : NaN;
  }

  // A matrix as people type it, or the first thing that is wrong with it.
  function parseMatrix(text) {
    const lines = text.split(/[\])]\s*,?\s*(?=[[(])|[\n;]/).map((line) => line.trim()).filter((line) => line !== "");
    const n = lines.length;
    if (n < 2 || n > MOST) throw new Error(`${n} row${n === 1 ? "" : "s"}; a matrix here has from 2 to ${MOST}, one to a line.`);
    return lines.map((line, i) => {
      const comma = line.split(/\s+/).some((word) => /^\d*,\d+$/.test(word))
        ? " A comma stands between entries here; write decimals with a point, as in 0.5." : "";
      const words = line.replace(/[[\](),]/g, " ").trim().split(/\s+/);
      if (words.length !== n) throw new Error(`Row ${i + 1} has ${words.length} entries; it needs ${n}, as many as there are rows.${comma}`);
      const row = words.map((word, k) => {
        const entry = parseNumber(word);
        if (!Number.isFinite(entry)) throw new Error(`Row ${i + 1}, entry ${k + 1}: “${word.slice(0, 20)}” is no number of at least 0; write 0.25 or 1/4.`);
        return entry;
      });
      const sum = row.reduce((total, entry) => total + entry, 0);
      if (Math.abs(sum - 1) > ROW_SUM) throw new Error(`Row ${i + 1} sums to ${Number(sum.toPrecision(6))}; each row must sum to 1.${comma}`);
      return Math.abs(sum - 1) > 1e-14 ? row.map((entry) => entry / sum) : row;
    });
  }

  function randomMatrix(n) {
    return Array.from({ length: n }, () => {
      const row = Array.from({ length: n }, () => -Math.log(1 - Math.random())); // uniform over all distributions
      const sum = row.reduce((total, entry) => total + entry, 0);
      return row.map((entry) => entry / sum);
    });
  }

  // Page -------------------------------------------------------------------------------------------------------------

  // A comparison at three digits, or at as many as show that the two differ.
  function compared(own, other) {
    const holds = own >= other;
    let digits = 3;
    while (!holds && digits < 12 && own.toFixed(digits) === other.toFixed(digits)) digits += 1;
    const [left, right] = [own.toFixed(digits), other.toFixed(digits)];
    if (!holds && left === right) return `${round(own)} = ${round(other)} but for rounding ✗`;
    return `${left} ${holds ? "≥" : "<"} ${right} ${holds ? "✓" : "✗"}`;
  }

  const round = (number) => (Number.isNaN(number) ? "–" : number.toFixed(3));
  const percent = (number) => (Number.isNaN(number) ? "–" : `${(100 * number).toFixed(1)}%`);
  const clamp = (number, low, high) => Math.min(high, Math.max(low, number));

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function start(root) {
    const presets = JSON.parse(document.getElementById("explorer-presets").textContent);
    const find = (name) => root.querySelector(`[data-part="${name}"]`);
    const state = { A: [], alpha: 0.5, preset: null };

    for (const name of Object.keys(presets)) find("preset").append(element("option", { value: name }, name));
    find("preset").append(element("option", { value: "" }, "your own"));

    // The bars are made once for each size, and then only moved, so that focus and pointer stay where they are.
    function build() {
      const n = state.A.length;
      const bars = find("bars");
      bars.replaceChildren();
      bars.style.setProperty("--n", n);
      state.A.forEach((row, i) => {
        const block = element("div", { class: "explorer-row", role: "group", "aria-label": `Row ${i + 1} of A` });
        block.append(element("div", { class: "explorer-row-name" }, `row ${i + 1}`));
        const strip = element("div", { class: "explorer-strip" });
        row.forEach((_, k) => {
          const bar = element("div", {
            class: i === k ? "explorer-bar explorer-diagonal" : "explorer-bar",
            role: "slider", tabindex: "0", "aria-orientation": "vertical",
            "aria-label": `A ${i + 1} ${k + 1}, attention of token ${i + 1} to token ${k + 1}`,
            "aria-valuemin": "0", "aria-valuemax": "1", "data-i": i, "data-k": k,
          }, element("div", { class: "explorer-fill" }));
          follow(bar, i, k);
          strip.append(element("div", { class: "explorer-cell" }, bar,
            element("output", { class: "explorer-value", "aria-hidden": "true" })));
        });
        block.append(strip);
        bars.append(block);
      });
    }

    function follow(bar, i, k) {
      const drag = (event) => {
        const box = bar.getBoundingClientRect();
        const value = (box.bottom - event.clientY) / box.height;
        change(withEntry(state.A, i, k, value));
      };
      bar.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        if (event.pointerType === "touch" && document.activeElement !== bar) return; // a swipe here scrolls the page
        bar.setPointerCapture(event.pointerId);
        bar.focus({ preventScroll: true });
        event.preventDefault();
        drag(event);
      });
      bar.addEventListener("pointerup", () => bar.focus({ preventScroll: true })); // a tap; a swipe is cancelled instead
      bar.addEventListener("pointermove", (event) => {
        if (bar.hasPointerCapture(event.pointerId)) drag(event);
      });
      bar.addEventListener("keydown", (event) => {
        const old = state.A[i][k];
        const moves = {
          ArrowUp: old + 1 / STEPS, ArrowRight: old + 1 / STEPS, ArrowDown: old - 1 / STEPS, ArrowLeft: old - 1 / STEPS,
          PageUp: old + 10 / STEPS, PageDown: old - 10 / STEPS, Home: 0, End: 1,
        };
        if (!(event.key in moves)) return;
        event.preventDefault();
        change(withEntry(state.A, i, k, moves[event.key]));
      });
    }

    function change(A, preset = "", typed = false) {
      const size = state.A.length;
      state.A = A;
      state.preset = preset;
      if (!typed) find("text").value = written();
      find("text").removeAttribute("aria-invalid");
      find("problem").textContent = "";
      find("size-problem").textContent = "";
      if (A.length !== size) build();
      show();
    }

    function show() {
      const { A, alpha, preset } = state;
      const found = report(A, alpha);
      find("preset").value = preset;
      find("lesson").textContent = preset ? presets[preset].lesson : "";
      find("size").value = A.length;
      find("alpha").value = alpha;
      find("alpha-value").textContent = alpha.toFixed(2);

      for (const bar of find("bars").querySelectorAll(".explorer-bar")) {
        const value = A[bar.dataset.i][bar.dataset.k];
        bar.firstChild.style.height = `${100 * value}%`;
        bar.setAttribute("aria-valuenow", value);
        bar.setAttribute("aria-valuetext", round(value));
        bar.nextSibling.textContent = A.length > 6 ? value.toFixed(2).replace(/^0/, "") : value.toFixed(2);
      }

      const { i, j } = found.pair;
      const why = found.holds
        ? `The pair ${i + 1}, ${j + 1} attains κ and is mutually self-dominant.`
        : found.attaining > 1
          ? `${found.attaining} pairs attain κ, and none is mutually self-dominant.`
          : `The pair ${i + 1}, ${j + 1} alone attains κ, and is not mutually self-dominant.`;
      find("verdict").dataset.holds = found.holds;
      find("verdict").textContent = `${found.holds ? "Tight." : "Not tight."} ${why}`;

      const numbers = {
        kappa: found.kappa, factor_kappa: found.factorKappa, bound: found.bound, gap: found.gap,
        relative_gap: found.relativeGap, margin: found.margin,
      };
      for (const [name, value] of Object.entries(numbers)) {
        const cell = find(name);
        cell.dataset.value = value;
        cell.textContent = name === "relative_gap" ? percent(value) : name === "margin" && value > 0 && value < 0.001 ? value.toExponential(0) : round(value);
      }
      find("attaining").dataset.value = found.attaining;
      find("attaining").textContent = found.attaining;
      find("meter-factor").style.width = `${100 * clamp(found.factorKappa, 0, 1)}%`;
      find("meter-bound").style.width = `${100 * clamp(found.bound, 0, 1)}%`;
      find("meter").setAttribute("aria-label",
        `kappa of the factor is ${round(found.factorKappa)}, the bound is ${round(found.bound)}`);

      find("pairs").replaceChildren(...found.pairs.map((pair) => {
        const line = element("tr", pair.attains ? { class: "explorer-attains" } : {},
          element("th", { scope: "row" }, `${pair.i + 1}, ${pair.j + 1}`),
          element("td", {}, pair.attains ? `${round(pair.tv)} = κ` : round(pair.tv)),
          element("td", {}, compared(A[pair.i][pair.i], A[pair.j][pair.i])),
          element("td", {}, compared(A[pair.j][pair.j], A[pair.i][pair.j])),
          element("td", {}, round(pair.factorTv)));
        line.dataset.tv = pair.tv;
        return line;
      }));
    }

    function written() {
      const rows = state.preset ? presets[state.preset].matrix : state.A;
      return rows.map((row) => row.join("  ")).join("\n");
    }

    function load(name) {
      change(presets[name].matrix.map((row) => row.map((entry) => parseNumber(entry))), name);
    }

    function apply() {
      try {
        change(parseMatrix(find("text").value), "", true);
      } catch (error) {
        find("problem").textContent = error.message;
        find("text").setAttribute("aria-invalid", "true");
      }
    }

    find("preset").addEventListener("change", (event) => event.target.value && load(event.target.value));
    find("alpha").addEventListener("input", (event) => {
      state.alpha = Number(event.target.value);
      show();
    });
    find("random").addEventListener("click", () => change(randomMatrix(state.A.length)));
    find("size").addEventListener("change", (event) => {
      const n = Number(event.target.value);
      if (Number.isInteger(n) && n >= 2 && n <= MOST) change(randomMatrix(n));
      else {
        event.target.value = state.A.length;
        find("size-problem").textContent = `N is a whole number from 2 to ${MOST}.`;
      }
    });
    find("apply").addEventListener("click", apply);

    load(Object.keys(presets)[0]);
    root.hidden = false;
  }

  const root = document.getElementById("explorer-app");
  if (root) start(root);
})();
