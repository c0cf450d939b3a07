"use strict";
// The slider of a run's samples: it stays where the reader has put it while newer pictures come.
let chosen = null;

function show(slider) {
  const figure = slider.closest("figure"), step = figure.dataset.steps.split(",")[slider.value];
  const image = figure.querySelector("img");
  image.src = figure.dataset.place + step;
  image.alt = `Samples after ${step} steps`;
  figure.querySelector("output").textContent = step;
}

document.addEventListener("input", ({ target }) => {
  if (target.id !== "slider") return;
  chosen = target.value === target.max ? null : target.value;
  show(target);
});
document.addEventListener("htmx:afterSwap", () => {
  const slider = document.getElementById("slider");
  if (!slider || chosen === null) return;
  slider.value = chosen;
  show(slider);
});

// Photos that are dropped are those that would be chosen.
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    const form = document.querySelector(".drop");
    if (!form) return;
    event.preventDefault();
    form.classList.toggle("over", type === "dragover");
    if (type !== "drop" || !event.dataTransfer.files.length) return;
    form.querySelector("input").files = event.dataTransfer.files;
    htmx.trigger(form, "change");
  });
