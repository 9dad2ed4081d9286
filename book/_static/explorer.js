/* The explorer: one stochastic matrix, its pairs of rows, and whether the layerwise bound is tight.
   Plain JavaScript, no library, no request. Definitions as in dobnb/equality.py; tests/test_explorer.py holds the
   numbers against it. */
"use strict";

(() => {
  const ATTAINS = 1e-12; // a pair attains kappa when it is within this of the largest, as in the package
  const ROW_SUM = 1e-6; // rows typed in may miss 1 by this much, and are then divided by their sum
  const MOST = 12; // tokens
  const STEP = 0.01; // of a dragged entry, and of an arrow key

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
      iDominates: A[i][i] >= A[j][i],
      jDominates: A[j][j] >= A[i][j],
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

  // One entry takes the value, and the others of its row keep their proportions.
  function withEntry(A, i, k, value) {
    const entry = Math.min(1, Math.max(0, value));
    const rest = A[i].reduce((sum, other, m) => (m === k ? sum : sum + other), 0);
    return A.map((row, r) => {
      if (r !== i) return row;
      return row.map((other, m) => {
        if (m === k) return entry;
        return rest > 0 ? (other * (1 - entry)) / rest : (1 - entry) / (row.length - 1);
      });
    });
  }

  function parseNumber(word) {
    const fraction = word.split("/");
    const numbers = fraction.map((part) => (/^[+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(part) ? Number(part) : NaN));
    return numbers.length === 1 ? numbers[0] : numbers.length === 2 ? numbers[0] / numbers[1] : NaN;
  }

  // A matrix as people type it, or the first thing that is wrong with it.
  function parseMatrix(text) {
    const lines = text.split(/[\n;]/).map((line) => line.trim()).filter((line) => line !== "");
    const n = lines.length;
    if (n < 2 || n > MOST) throw new Error(`${n} rows; a matrix here has from 2 to ${MOST}, one to a line.`);
    return lines.map((line, i) => {
      const words = line.replace(/[[\](),]/g, " ").trim().split(/\s+/);
      if (words.length !== n) throw new Error(`Row ${i + 1} has ${words.length} entries; it needs ${n}, as many as there are rows.`);
      const row = words.map((word, k) => {
        const entry = parseNumber(word);
        if (!Number.isFinite(entry)) throw new Error(`Row ${i + 1}, entry ${k + 1}: “${word.slice(0, 20)}” is no number of at least 0; write 0.25 or 1/4.`);
        return entry;
      });
      const sum = row.reduce((total, entry) => total + entry, 0);
      if (Math.abs(sum - 1) > ROW_SUM) throw new Error(`Row ${i + 1} sums to ${Number(sum.toPrecision(6))}; each row must sum to 1.`);
      return row.map((entry) => entry / sum);
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
        change(withEntry(state.A, i, k, Math.round(clamp(value, 0, 1) / STEP) * STEP));
      };
      bar.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        bar.setPointerCapture(event.pointerId);
        bar.focus({ preventScroll: true });
        event.preventDefault();
        drag(event);
      });
      bar.addEventListener("pointermove", (event) => {
        if (bar.hasPointerCapture(event.pointerId)) drag(event);
      });
      bar.addEventListener("keydown", (event) => {
        const old = state.A[i][k];
        const moves = {
          ArrowUp: old + STEP, ArrowRight: old + STEP, ArrowDown: old - STEP, ArrowLeft: old - STEP,
          PageUp: old + 10 * STEP, PageDown: old - 10 * STEP, Home: 0, End: 1,
        };
        if (!(event.key in moves)) return;
        event.preventDefault();
        change(withEntry(state.A, i, k, moves[event.key]));
      });
    }

    function change(A, preset = "") {
      const size = state.A.length;
      state.A = A;
      state.preset = preset;
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

      const mark = (yes) => (yes ? "✓" : "✗");
      find("pairs").replaceChildren(...found.pairs.map((pair) => {
        const side = (own, other, holds) => `${round(own)} ${holds ? "≥" : "<"} ${round(other)} ${mark(holds)}`;
        const line = element("tr", pair.attains ? { class: "explorer-attains" } : {},
          element("th", { scope: "row" }, `${pair.i + 1}, ${pair.j + 1}`),
          element("td", {}, pair.attains ? `${round(pair.tv)} = κ` : round(pair.tv)),
          element("td", {}, side(A[pair.i][pair.i], A[pair.j][pair.i], pair.iDominates)),
          element("td", {}, side(A[pair.j][pair.j], A[pair.i][pair.j], pair.jDominates)),
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
        change(parseMatrix(find("text").value));
        find("problem").textContent = "";
        find("text").removeAttribute("aria-invalid");
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
      const n = Math.round(Number(event.target.value));
      if (n >= 2 && n <= MOST) change(randomMatrix(n));
      else event.target.value = state.A.length;
    });
    find("typing").addEventListener("toggle", (event) => {
      if (event.target.open) find("text").value = written();
    });
    find("apply").addEventListener("click", apply);

    load(Object.keys(presets)[0]);
    root.hidden = false;
  }

  const root = document.getElementById("explorer-app");
  if (root) start(root);
})();
