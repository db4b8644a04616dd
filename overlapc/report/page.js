// The timeline of a report: uPlot draws axes, cursor and zoom; bars are painted from sorted spans, so that 100,000 stay smooth.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LANE = 22, HEAD = 18, LEFT = 96;
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLORS = { kernel: "--kernel", extern: "--extern", start: "--comm", comm: "--comm", idle: "--idle", wait: "--soft", view: "--soft", noop: "--soft" };
  const byId = id => document.getElementById(id);
  const of = rank => rank.same === null ? rank.data : data.ranks[rank.same].data;
  const time = ns => Math.abs(ns) >= 1e6 ? (ns / 1e6).toFixed(3) + " ms" : (ns / 1e3).toFixed(1) + " µs";
  const bytes = n => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB" : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : Math.round(n / 1024) + " KiB";
  const shown = { rank: 0, all: false, orders: new Set(["before", "after", "measured"]), node: null };
  let bands = [], plot = null, memory = null, end = 1, painted = 0, paintMs = 0;

  // --- bands: one for each rank, order and lane, with its spans sorted by start

  function makeBands() {
    const ranks = shown.all ? data.ranks.map((_, at) => at) : [shown.rank];
    bands = []; end = 1;
    let y = 0;
    for (const at of ranks)
      for (const [name, order] of Object.entries(of(data.ranks[at]).orders)) {
        if (!shown.orders.has(name)) continue;
        end = Math.max(end, order.end);
        const title = (shown.all ? `rank ${data.ranks[at].rank}, ` : "") + (name === "measured" ? "measured" : `${name} the passes, predicted`);
        bands.push({ head: title + `: ${time(order.end)}`, y });
        y += HEAD;
        order.lanes.forEach((lane, number) => {
          const spans = order.spans.filter(span => span[0] === number).sort((a, b) => a[2] - b[2]);
          bands.push({ rank: at, order: name, lane, spans, y, borders: order.borders });
          y += LANE;
        });
        y += 6;
      }
    return y;
  }

  // Index of the first span of a band that ends after `at`: spans of one lane do not overlap, except collectives in flight.
  function first(spans, at) {
    let low = 0, high = spans.length;
    while (low < high) { const middle = (low + high) >> 1; if (spans[middle][3] < at) low = middle + 1; else high = middle; }
    return low;
  }

  function paint(u) {
    const began = performance.now(), { ctx } = u, dpr = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    const from = u.scales.x.min * 1e6, to = u.scales.x.max * 1e6, scale = width / (to - from);
    ctx.save();
    ctx.beginPath(); ctx.rect(0, top, left + width, height); ctx.clip();
    ctx.font = `${11 * dpr}px system-ui, sans-serif`; ctx.textBaseline = "middle"; ctx.textAlign = "left";
    const ink = color("--ink"), soft = color("--soft"), onBar = color("--on-bar");
    painted = 0;
    const paints = data.kinds.map(kind => color(COLORS[kind]));
    for (const band of bands) {
      const y = top + band.y * dpr;
      if (band.head) { ctx.fillStyle = ink; ctx.fillText(band.head, 6 * dpr, y + HEAD / 2 * dpr); continue; }
      ctx.fillStyle = soft; ctx.fillText(band.lane.slice(0, 14), 6 * dpr, y + LANE / 2 * dpr);
      let till = -1, kind = -1, start = 0;
      const flush = () => { if (till >= 0) { ctx.fillStyle = paints[kind]; ctx.fillRect(start, y + 2 * dpr, Math.max(till - start, dpr / 2), (LANE - 4) * dpr); } till = -1; };
      for (let at = first(band.spans, from); at < band.spans.length && band.spans[at][2] <= to; at++) {
        const span = band.spans[at];
        painted++;
        const x0 = Math.max(left, left + (span[2] - from) * scale), x1 = Math.min(left + width, left + (span[3] - from) * scale);
        const narrow = x1 - x0 < 2 * dpr;
        if (narrow && till >= 0 && span[1] === kind && x0 - till < dpr) { till = Math.max(till, x1); continue; }
        flush(); start = x0; till = x1; kind = span[1];
        if (!narrow) {
          flush();
          if (x1 - x0 > 60 * dpr) {
            ctx.save(); ctx.beginPath(); ctx.rect(x0, y, x1 - x0 - 4 * dpr, LANE * dpr); ctx.clip();
            ctx.fillStyle = onBar; ctx.fillText(span[4].slice(span[4].indexOf("/") + 1), x0 + 4 * dpr, y + LANE / 2 * dpr); ctx.restore();
          }
        }
        if (span[4] === shown.node) {
          flush(); ctx.strokeStyle = ink; ctx.lineWidth = 2 * dpr;
          ctx.strokeRect(x0, y + dpr, Math.max(x1 - x0, 2 * dpr), (LANE - 2) * dpr);
        }
      }
      flush();
    }
    ctx.restore();
    paintMs = performance.now() - began;
  }

  // --- zoom and pan, the same for both plots

  function range(u, min, max) {
    const width = Math.min(max - min, end / 1e6), low = Math.max(0, Math.min(min, end / 1e6 - width));
    for (const each of [plot, memory]) if (each) each.setScale("x", { min: low, max: low + Math.max(width, 1e-5) });
  }
  const whole = () => range(plot, 0, end / 1e6);

  const navigation = () => ({ hooks: {
    ready: u => {
      let panned = null, down = null;
      u.over.addEventListener("wheel", event => {
        event.preventDefault();
        const { min, max } = u.scales.x, at = u.posToVal(event.offsetX, "x");
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          const by = (event.deltaX || event.deltaY) / u.over.clientWidth * (max - min); range(u, min + by, max + by); return;
        }
        const factor = event.deltaY < 0 ? 0.8 : 1.25; range(u, at - (at - min) * factor, at + (max - at) * factor);
      }, { passive: false });
      u.over.addEventListener("mousedown", event => {
        down = event.offsetX;
        if (event.shiftKey) { panned = { x: event.clientX, min: u.scales.x.min, max: u.scales.x.max }; event.stopImmediatePropagation(); }
      }, true);
      addEventListener("mousemove", event => {
        if (!panned) return;
        const by = (panned.x - event.clientX) / u.over.clientWidth * (panned.max - panned.min);
        range(u, panned.min + by, panned.max + by);
      });
      addEventListener("mouseup", () => { panned = null; });
      u.over.addEventListener("click", event => { if (u === plot && down !== null && Math.abs(event.offsetX - down) < 4) pick(u, event.offsetX, event.offsetY); });
      u.over.addEventListener("dblclick", whole);
      // One finger moves the view, two fingers zoom around their center; vertical movement scrolls the page.
      let touched = null;
      const fingers = event => {
        const at = [...event.touches].map(each => each.clientX - u.over.getBoundingClientRect().left);
        return { middle: at.reduce((sum, x) => sum + x, 0) / at.length, apart: at.length > 1 ? Math.abs(at[0] - at[1]) : 0, count: at.length };
      };
      u.over.addEventListener("touchstart", event => { touched = { ...fingers(event), min: u.scales.x.min, max: u.scales.x.max }; }, { passive: true });
      u.over.addEventListener("touchmove", event => {
        const now = fingers(event);
        if (!touched || touched.count !== now.count) return;
        const { min, max, middle, apart } = touched, wide = u.over.clientWidth;
        const width = (max - min) * (apart && now.apart ? apart / now.apart : 1), held = min + middle / wide * (max - min);
        range(u, held - now.middle / wide * width, held + (1 - now.middle / wide) * width);
      }, { passive: true });
      u.over.addEventListener("touchend", () => { touched = null; });
    },
    setSelect: u => {
      if (u.select.width < 4) return;
      range(u, u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    },
  } });

  function options(height, more) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
    return {
      width: Math.max(280, byId("timeline").clientWidth - 2), height, legend: { show: false }, plugins: [navigation()],
      cursor: { drag: { x: true, y: false, setScale: false }, y: false, points: { show: false }, sync: { key: "step" } },
      scales: { x: { time: false }, ...more.scales }, hooks: more.hooks || {}, series: more.series,
      axes: [{ ...axis, values: (u, ticks) => ticks.map(tick => `${+tick.toPrecision(8)} ms`), space: 80, size: 32 }, { ...axis, size: LEFT, ...more.axis }],
    };
  }

  function draw() {
    const height = makeBands();
    for (const each of [plot, memory]) if (each) each.destroy();
    plot = memory = null;
    plot = new uPlot(options(height + 50, {
      scales: { y: { range: [0, 1] } }, series: [{}, { show: true, paths: () => null, points: { show: false } }],
      axis: { values: () => [], grid: { show: false }, ticks: { show: false } }, hooks: { draw: [paint] },
    }), [[0, end / 1e6], [0, 1]], byId("timeline"));
    const own = of(data.ranks[shown.rank]);
    const curves = ["after", "before"].filter(name => shown.orders.has(name) && (own.orders[name] || {}).memory).map(name => own.orders[name]);
    if (curves.length) {
      const budget = own.peak.budget, paths = uPlot.paths.stepped({ align: 1 }), points = { show: false };
      const all = curves.flatMap(({ memory, end }, curve) => [...memory, [end, memory[memory.length - 1][1]]].map(point => [...point, curve]));
      all.sort((a, b) => a[0] - b[0]);
      const columns = [all.map(point => point[0] / 1e6), ...curves.map((_, curve) => all.map(point => point[2] === curve ? point[1] : undefined))];
      const series = [{}, ...curves.map(each => each === own.orders.after
        ? { stroke: color("--memory"), fill: color("--memory") + "55", width: 1.5, paths, points }
        : { stroke: color("--soft"), width: 1, paths, points })];
      if (budget) { series.push({ stroke: color("--idle"), dash: [6, 4], width: 1.5, points }); columns.push(columns[0].map(() => budget)); }
      memory = new uPlot(options(180, {
        scales: { y: { range: (u, low, high) => [0, Math.max(high, budget || 0) * 1.08 || 1] } }, series,
        axis: { values: (u, ticks) => ticks.map(bytes), incrs: Array.from({ length: 50 }, (_, at) => 2 ** at) },
      }), columns, byId("memory"));
    }
    whole();
    peak(own.peak);
  }

  // --- nodes

  function pick(u, x, y) {
    const band = bands.find(each => each.spans && y >= each.y && y < each.y + LANE);
    if (!band) return;
    const at = u.posToVal(x, "x") * 1e6, near = (u.scales.x.max - u.scales.x.min) * 1e6 / u.over.clientWidth * 3;
    let best = null, far = Infinity;
    for (let i = first(band.spans, at - near); i < band.spans.length && band.spans[i][2] <= at + near; i++) {
      const span = band.spans[i], distance = Math.max(span[2] - at, at - span[3], 0);
      if (distance < far) { far = distance; best = span; }
    }
    if (best) choose(best[4], band, best, false);
  }

  function choose(node, band, span, zoom) {
    shown.node = node;
    if (!band) {
      for (const each of bands) {
        const found = each.spans && each.order !== "before" && each.lane !== "compute" && each.spans.find(one => one[4] === node);
        if (found) { band = each; span = found; break; }
      }
    }
    describe(node, band, span);
    for (const row of document.querySelectorAll("#collectives tbody tr")) {
      const chosen = row.dataset.node === node;
      row.classList.toggle("chosen", chosen);
      if (chosen && !zoom) { row.hidden = false; const box = row.closest(".scroll"); box.scrollTop = row.offsetTop - box.clientHeight / 2; }
    }
    if (zoom && span) { const around = (span[3] - span[2]) * 3; range(plot, (span[2] - around) / 1e6, (span[3] + around) / 1e6); byId("timeline").scrollIntoView({ block: "nearest" }); }
    plot.redraw(false);
  }

  function describe(node, band, span) {
    const facts = of(data.ranks[band ? band.rank : shown.rank]).nodes[node] || {}, rows = [];
    const [graph, name] = [node.slice(0, node.indexOf("/")), node.slice(node.indexOf("/") + 1)];
    const waits = span && data.kinds[span[1]] === "idle";
    if (span) rows.push([`${band.order === "measured" ? "measured" : band.order + " the passes"}`, `${time(span[3] - span[2])}, from ${time(span[2])} on ${band.lane}` + (waits ? "; compute waits for it" : "")]);
    for (const [title, key] of [["what", "what"], ["of", "of"], ["group", "group"], ["limited by", "limit"], ["estimate from", "by"], ["line", "line"]])
      if (facts[key]) rows.push([title, facts[key]]);
    if (span) {
      const beside = bands.filter(each => each.spans && each !== band && each.rank === band.rank && each.order === band.order)
        .flatMap(each => each.spans.filter(one => one[2] < span[3] && one[3] > span[2] && one[4] !== node));
      const names = [...new Set(beside.sort((a, b) => (b[3] - b[2]) - (a[3] - a[2])).map(one => one[4].slice(one[4].indexOf("/") + 1)))];
      if (names.length) rows.push(["runs beside", names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "")]);
    }
    const panel = byId("node"), list = document.createElement("dl"), head = document.createElement("b");
    head.textContent = `${name} in ${graph}`;
    for (const [title, value] of rows) for (const [tag, text] of [["dt", title], ["dd", value]]) { const item = document.createElement(tag); item.textContent = text; list.append(item); }
    panel.replaceChildren(head, list);
    panel.hidden = false;
  }

  function peak(found) {
    const panel = byId("peak");
    panel.hidden = !found.graph;
    if (!found.graph) return;
    const head = document.createElement("b"), list = document.createElement("dl");
    head.textContent = `Peak: ${bytes(found.bytes)} in ${found.graph}` + (found.node ? ` at ${found.node}` : "") + (found.budget ? `, budget ${bytes(found.budget)}` : "");
    for (const [name, of, size] of [...found.held, ...(found.more ? [[`and ${found.more} more`, "", found.rest]] : [])]) {
      const [row, term, amount, module] = ["div", "dt", "dd", "small"].map(tag => document.createElement(tag));
      term.textContent = `${name} `; module.textContent = of; amount.textContent = size;
      term.append(module); row.append(term, amount); list.append(row);
    }
    panel.replaceChildren(head, list);
  }

  // --- controls and the table

  data.ranks.forEach((rank, at) => byId("rank").add(new Option(rank.rank, at)));
  byId("rank").onchange = event => { shown.rank = +event.target.value; draw(); };
  byId("all-ranks").onchange = event => { shown.all = event.target.checked; draw(); };
  byId("all-ranks").parentElement.hidden = data.ranks.length < 2;
  byId("whole").onclick = whole;
  for (const name of Object.keys(of(data.ranks[0]).orders)) {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox"; box.checked = true; box.id = `order-${name}`;
    box.onchange = () => { box.checked ? shown.orders.add(name) : shown.orders.delete(name); draw(); };
    label.append(box, ` ${name} `); byId("orders").append(label);
  }
  const rows = [...document.querySelectorAll("#collectives tbody tr")];
  for (const row of rows) row.onclick = () => choose(row.dataset.node, null, null, true);
  for (const row of rows) row.onkeydown = event => { if (event.key === "Enter") row.click(); };
  const count = () => { byId("count").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`; };
  byId("filter").oninput = event => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of rows) { const text = row.textContent.toLowerCase(); row.hidden = !words.every(word => text.includes(word)); }
    count();
  };
  const heads = [...document.querySelectorAll("#collectives th")];
  heads.forEach((head, at) => head.onclick = () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => JSON.parse(row.dataset.keys)[at];
    const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    const sorted = rows.map(row => [key(row), row]).sort((a, b) => (up ? 1 : -1) * order(a[0], b[0]));
    document.querySelector("#collectives tbody").append(...sorted.map(([, row]) => row));
  });
  count();
  draw();
  // For scripts and tests: the visible time range in ms; the maximum of each memory curve (after the passes, before them,
  // the budget); the number of bands and spans painted last, and how long that took.
  window.overlapcTimeline = {
    range: () => [plot.scales.x.min, plot.scales.x.max],
    memory: () => (memory ? memory.data.slice(1).map(column => Math.max(...column.filter(each => each !== undefined))) : []),
    drawn: () => ({ bands: bands.length, spans: painted, ms: paintMs }),
  };
  let pending = 0;
  addEventListener("resize", () => { clearTimeout(pending); pending = setTimeout(draw, 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
