"use strict";
let chosen = null; // Place of the slider: it stays there while newer samples come.

function show(slider) {
  const figure = slider.closest("figure"), step = figure.dataset.steps.split(",")[slider.value];
  const image = figure.querySelector("img");
  image.src = `${figure.dataset.place}${step.padStart(8, "0")}.png`;
  image.alt = `Samples after ${step} steps`;
  figure.querySelector("output").textContent = step;
}

document.addEventListener("input", ({ target }) => {
  if (target.id === "slider") show(target, (chosen = target.value === target.max ? null : target.value));
});
document.addEventListener("htmx:afterSwap", () => {
  const slider = document.getElementById("slider");
  if (slider && chosen !== null) show(slider, (slider.value = chosen));
});
document.addEventListener("htmx:afterRequest", ({ detail }) => {
  const line = document.getElementById("problem"), place = detail.pathInfo.requestPath.split("?")[0];
  if (detail.successful && line.dataset.place !== place) return; // Another request may still fail.
  line.dataset.place = place;
  const text = detail.successful ? "" : detail.xhr.responseText || "The server does not answer. Is it still there?";
  if (line.textContent !== text) line.textContent = text;
});
