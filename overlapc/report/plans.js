// Plot of several plans, drawn by uPlot: one quantity over a varied option, a line for each combination of the others.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = ["--extern", "--idle", "--comm", "--attention", "--host", "--convolution", "--memory", "--library"];
  const DASHES = [[], [8, 4], [2, 3]];  // used if there are more lines than colors
  const byId = id => document.getElementById(id);
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const style = at => ({ stroke: color(COLORS[at % COLORS.length]), dash: DASHES[Math.floor(at / COLORS.length) % DASHES.length] });
  const number = value => value >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  let plot = null, measure = 0;

  function draw() {
    if (plot) plot.destroy();
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
    const wide = data.places[data.places.length - 1] >= 8 * data.places[0];  // use a logarithmic axis
    plot = new uPlot({
      width: Math.max(280, byId("plot").clientWidth - 2), height: 380, legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      scales: {
        x: { time: false, ...(wide ? { distr: 3, log: 2 } : {}) },
        y: { range: (u, low, high) => [0, high * 1.08 || 1] },
      },
      series: [{}, ...data.lines.map((_, at) => ({ ...style(at), width: 2, points: { show: true, size: 7 } }))],
      axes: [
        { ...axis, label: data.across, splits: () => data.places, values: (u, ticks) => ticks.map(number), size: 40, labelSize: 22 },
        { ...axis, label: data.measures[measure], values: (u, ticks) => ticks.map(number), size: 76, labelSize: 22 },
      ],
      hooks: { setCursor: [point] },
    }, [data.places, ...data.lines.map(line => line.values[measure])], byId("plot"));
  }

  // Shows the values of every line at the cursor in a panel.
  function point(u) {
    const at = u.cursor.idx, panel = byId("point");
    panel.hidden = at === null || at === undefined;
    if (panel.hidden) return;
    const head = document.createElement("b"), list = document.createElement("dl");
    head.textContent = `${number(data.places[at])} ${data.across}: ${data.measures[measure]}`;
    for (const line of data.lines) {
      const [term, figure] = ["dt", "dd"].map(tag => document.createElement(tag)), value = line.values[measure][at];
      term.textContent = line.name || "planned"; figure.textContent = value === null ? "does not fit" : number(value);
      list.append(term, figure);
    }
    panel.replaceChildren(head, list);
  }

  data.measures.forEach((name, at) => byId("measure").add(new Option(name, at)));
  byId("measure").onchange = event => { measure = +event.target.value; draw(); };
  if (data.lines.length > 1)
    data.lines.forEach((line, at) => {
      const label = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = `var(${COLORS[at % COLORS.length]})`;
      label.append(mark, line.name); byId("lines").append(label);
    });
  draw();
  // For scripts and tests: the drawn data.
  window.overlapcPlans = { data: () => plot.data, axes: () => plot.axes.map(axis => axis.label) };
  let pending = 0;
  addEventListener("resize", () => { clearTimeout(pending); pending = setTimeout(draw, 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
