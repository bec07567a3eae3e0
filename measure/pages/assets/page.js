"use strict";
(async () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const plots = Array.from(document.querySelectorAll(".plot"));
  const templates = read("templates");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: "hover",
    showSendToCloud: false, // on by default: would upload the figure's data
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    toImageButtonOptions: { format: "svg" },
  };

  const unpack = async () => {
    const packed = atob(document.getElementById("plotly-gzip").textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.appendChild(script);
  };

  // Buttons of plotly would lie on labels and legends, and are white in both modes.
  const offer = (plot, menus) => {
    plot.previousElementSibling?.matches(".choices") && plot.previousElementSibling.remove();
    for (const { buttons, active } of menus) {
      const row = document.createElement("div");
      row.className = "choices";
      row.append(...buttons.map(({ label, method, args }, index) => {
        const button = document.createElement("button");
        button.textContent = label;
        button.ariaPressed = index === active;
        button.addEventListener("click", () => {
          for (const each of row.children) each.ariaPressed = each === button;
          Plotly[method](plot, ...args);
        });
        return button;
      }));
      plot.before(row);
    }
  };

  const draw = (plot, ink) => {
    const figure = read(plot.id.replace("figure", "data"));
    figure.layout.template = templates[ink];
    plot.dataset.ink = ink;
    offer(plot, figure.layout.updatemenus ?? []);
    delete figure.layout.updatemenus;
    return Plotly.react(plot, figure.data, figure.layout, config);
  };
  const ink = () => (dark.matches ? "dark" : "light");

  try {
    await unpack();
  } catch (error) {
    for (const plot of plots) plot.textContent = "This browser cannot unpack the plots: " + error;
    return;
  }
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        seen.unobserve(entry.target);
        draw(entry.target, ink());
      }
    },
    { rootMargin: "600px" },
  );
  for (const plot of plots) seen.observe(plot);
  dark.addEventListener("change", () => {
    for (const plot of plots) if (plot.dataset.ink) draw(plot, ink());
  });
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    for (const plot of plots) if (plot.dataset.ink !== "light") draw(plot, "light");
  });

  const links = new Map();
  for (const link of document.querySelectorAll("nav a")) links.set(link.hash.slice(1), link);
  const reading = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const link = links.get(entry.target.id);
        if (link) link.classList.toggle("here", entry.isIntersecting);
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const section of document.querySelectorAll("section")) reading.observe(section);
})();
