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

  function bars(view) {
    const apart = [0, 1, 7, 3, 5, 4, 2, 6]; // side by side, red and green would be one to many
    const traces = view.bars.map((bar, place) => ({
      x: bar.x, y: bar.y, name: bar.name, type: "bar",
      marker: { color: series(apart[place % 8]), line: { width: 1, color: colour("--card") } },
      error_y: { type: "data", array: bar.sd, visible: bar.sd.some((sd) => sd > 0), color: colour("--ink"), thickness: 1.3, width: 4 },
      text: bar.told, textposition: "none", hovertemplate: "%{x}: %{text}<extra>" + bar.name + "</extra>",
    }));
    const x = { title: { text: view.x, standoff: 6, font: { size: 13 } }, type: "category" };
    return [traces, { xaxis: x, yaxis: { title: { text: view.y, standoff: 6, font: { size: 13 } } }, hovermode: "closest", barmode: "group" }];
  }

  function scatter(view, chart) {
    // Shapes differ as well as colours: not everyone sees the latter.
    const looks = [
      { symbol: "circle", size: 4, ink: colour("--soft"), opacity: 0.4 },
      { symbol: "x-thin-open", size: 6, ink: series(7), opacity: 0.9 },
      { symbol: "circle", size: 8, ink: series(0), opacity: 0.9 },
      { symbol: "diamond", size: 14, ink: series(5), opacity: 1 },
      { symbol: "star", size: 17, ink: series(1), opacity: 1 },
    ];
    const names = view.names || chart.names;
    const traces = view.groups.map((group) => {
      const look = looks[group.place];
      return {
        x: group.at.map((n) => view.x[n]), y: group.at.map((n) => view.y[n]), text: group.at.map((n) => names[n]),
        name: group.name, type: "scatter", mode: "markers",
        marker: {
          symbol: look.symbol, size: look.size, color: look.ink, opacity: look.opacity,
          line: { width: look.symbol.endsWith("open") ? 1.3 : look.size > 5 ? 1 : 0, color: look.symbol.endsWith("open") ? look.ink : colour("--card") },
        },
        hovertemplate: "%{text}<extra>" + group.name + "</extra>",
      };
    });
    const bare = { showgrid: false, showticklabels: false, ticks: "", showline: true, mirror: true, title: "" };
    return [traces, {
      xaxis: bare, yaxis: { ...bare, scaleanchor: "x" }, hovermode: "closest", legend: { y: -0.02 },
      annotations: [{
        xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", align: "left", showarrow: false,
        text: view.told, font: { size: 12, color: colour("--soft") },
      }],
    }];
  }

  const kinds = { curves, privacy, bars, scatter };

  function draw(chart) {
    const box = document.getElementById(chart.id);
    const picked = chart.choice && document.querySelector(`input[name="${chart.choice}"]:checked`);
    const view = chart.views[picked ? picked.value : Object.keys(chart.views)[0]];
    const [traces, own] = kinds[chart.kind](view, chart);
    const ink = colour("--soft"), line = colour("--line");
    const axis = { gridcolor: line, linecolor: line, tickcolor: line, zeroline: false, automargin: true };
    const layout = {
      ...own,
      xaxis: { ...axis, ...own.xaxis }, yaxis: { ...axis, ...own.yaxis },
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 12, r: 12, t: own.annotations ? 26 : 10, b: 12 },
      legend: { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { color: colour("--ink") }, ...own.legend },
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
