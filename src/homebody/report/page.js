"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const series = (place) => colour(`--c${(place % 8) + 1}`);
  const faint = (hex, alpha) => {
    const part = (at) => parseInt(hex.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  };

  function curves(view) {
    const traces = [];
    view.series.forEach((line) => {
      const ink = series(line.place);
      const dash = dashes[line.place % dashes.length];
      if (line.low) {
        traces.push({
          x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()],
          type: "scatter", mode: "lines", fill: "toself", fillcolor: faint(ink, 0.18), line: { width: 0 },
          hoverinfo: "skip", showlegend: false, legendgroup: line.name,
        });
      }
      const marks = line.x.length < 16;
      traces.push({
        x: line.x, y: line.mean, name: line.name, legendgroup: line.name, type: "scatter",
        mode: line.loose ? "markers" : marks ? "lines+markers" : "lines",
        line: { color: ink, width: 2.2, dash },
        marker: { color: ink, size: line.loose ? 10 : 6, symbol: line.loose ? "circle-open" : "circle" },
        text: line.told, hovertemplate: "%{text}<extra>" + line.name + "</extra>",
      });
    });
    const x = { title: { text: view.x, standoff: 6, font: { size: 13 } } };
    if (view.ticks) Object.assign(x, { tickmode: "array", tickvals: view.ticks.at, ticktext: view.ticks.text });
    return [traces, { xaxis: x, yaxis: { title: { text: view.y, standoff: 6, font: { size: 13 } } }, hovermode: "x unified" }];
  }

  function privacy(view) {
    const kinds = [["federated", "circle", 0], ["centralised", "square", 1]];
    const traces = kinds.map(([kind, symbol, place]) => {
      const points = view.points.filter((point) => point.kind === kind);
      return {
        x: points.map((point) => point.x), y: points.map((point) => point.y), name: kind, type: "scatter",
        mode: "markers+text", text: points.map((point) => point.name),
        textposition: points.map((point) => point.side), cliponaxis: false,
        textfont: { color: colour("--ink"), size: 12 },
        marker: { symbol, size: 12, color: series(place), line: { width: 1.5, color: colour("--card") } },
        error_y: {
          type: "data", array: points.map((point) => point.sd), color: series(place), thickness: 1.4, width: 5,
        },
        customdata: points.map((point) => point.told), hovertemplate: "%{customdata}<extra></extra>",
      };
    });
    const [left, right] = view.zone;
    const layout = {
      xaxis: {
        title: { text: view.x, standoff: 6, font: { size: 13 } }, range: view.range, zeroline: false,
        tickmode: "array", tickvals: view.ticks.at, ticktext: view.ticks.text,
      },
      yaxis: { title: { text: view.y, standoff: 6, font: { size: 13 } }, range: view.height },
      hovermode: "closest",
      shapes: [{
        type: "rect", xref: "x", yref: "paper", x0: left, x1: right, y0: 0, y1: 1, layer: "below",
        fillcolor: colour("--zone"), line: { width: 0 },
      }],
      annotations: [{
        xref: "x", yref: "paper", x: (left + right) / 2, y: 1, yanchor: "bottom", showarrow: false,
        text: view.zone_text, font: { size: 12, color: colour("--soft") },
      }],
    };
    return [traces, layout];
  }

  const kinds = { curves, privacy };

  function draw(chart) {
    const box = document.getElementById(chart.id);
    const picked = chart.choice && document.querySelector(`input[name="${chart.choice}"]:checked`);
    const view = chart.views[picked ? picked.value : Object.keys(chart.views)[0]];
    const [traces, own] = kinds[chart.kind](view);
    const ink = colour("--soft"), line = colour("--line");
    const axis = { gridcolor: line, linecolor: line, tickcolor: line, zeroline: false, automargin: true };
    const layout = {
      ...own,
      xaxis: { ...axis, ...own.xaxis }, yaxis: { ...axis, ...own.yaxis },
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 12, r: 12, t: own.annotations ? 26 : 10, b: 12 },
      legend: { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { color: colour("--ink") } },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: line, font: { color: colour("--ink") } },
      dragmode: false,
    };
    const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
    Plotly.react(box, traces, layout, config).then(() => box.setAttribute("data-drawn", traces.length));
  }

  const all = () => charts.forEach(draw);
  document.querySelectorAll(".choice input").forEach((input) => {
    input.addEventListener("change", () => charts.filter((chart) => chart.choice === input.name).forEach(draw));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
