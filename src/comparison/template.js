"use strict";
(() => {
  const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  const figures = [...document.querySelectorAll(".figure")];
  const drawn = figures.map((element) => {
    const figure = JSON.parse(document.getElementById(`figure-${element.dataset.figure}`).textContent);
    return Plotly.newPlot(element, figure.data, figure.layout, options);
  });
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = "yes"; });

  // One switch per strategy, for all figures; a trace belongs to a strategy by its `meta`.
  for (const button of document.querySelectorAll("nav button")) {
    button.addEventListener("click", () => {
      const strategy = Number(button.dataset.strategy);
      const visible = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(visible));
      for (const element of document.querySelectorAll(`main [data-strategy="${strategy}"]`)) {
        element.classList.toggle("off", !visible);
      }
      for (const element of figures) {
        const traces = element.data.flatMap((trace, index) => (trace.meta === strategy ? [index] : []));
        if (traces.length) Plotly.restyle(element, { visible }, traces);
      }
    });
  }

  // Paper has a width of its own, and what is drawn does not follow it by itself.
  const resize = () => figures.forEach((element) => Plotly.Plots.resize(element));
  addEventListener("beforeprint", () => { document.body.classList.add("printing"); resize(); });
  addEventListener("afterprint", () => { document.body.classList.remove("printing"); resize(); });
})();
