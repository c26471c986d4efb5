"use strict";
// Sorting, filtering, and what a pointer or a finger asks of a picture; a page without it says all the same.
const number = (text) => {
  const match = text.replace("−", "-").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
  return match ? Number(match[0]) : null;
};
const compare = (a, b, sign) => {
  const [x, y] = [number(a), number(b)];
  if (x !== null && y !== null) return sign * (x - y);
  if ((x === null) !== (y === null)) return x === null ? 1 : -1;
  return sign * a.localeCompare(b);
};
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const sort = (head, place) => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const left = head.classList.contains("left");
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const text = (row) => row.cells[place].textContent;
    [...body.rows]
      .sort((a, b) => left ? sign * text(a).localeCompare(text(b), undefined, {numeric: true}) : compare(text(a), text(b), sign))
      .forEach((row) => body.append(row));
  };
  heads.forEach((head, place) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head, place));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head, place); });
  });
  if (body.rows.length < 8) continue;
  const filter = document.createElement("input");
  Object.assign(filter, {type: "search", placeholder: `filter ${body.rows.length} rows`, ariaLabel: "filter rows"});
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.parentElement.before(filter);
}
for (const cards of document.querySelectorAll(".cards")) {
  const items = [...cards.children], bar = document.createElement("p"), order = document.createElement("select");
  const rows = [...new Set([...cards.querySelectorAll("li")].map((reply) => reply.dataset.who))];
  const known = (card, who) => Number(card.querySelector(`li[data-who="${CSS.escape(who)}"]`)?.dataset.known ?? -1);
  order.append(new Option("on which the methods differ most", ""), ...rows.map((who) => new Option(`that ${who} knows best`, who)));
  order.addEventListener("change", () => {
    const sorted = order.value ? [...items].sort((a, b) => known(b, order.value) - known(a, order.value)) : items;
    cards.append(...sorted);
  });
  const filter = Object.assign(document.createElement("input"), {type: "search", placeholder: "show these models: gd, lora", ariaLabel: "show these models"});
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    for (const reply of cards.querySelectorAll("li")) {
      reply.hidden = words.length > 0 && !words.some((word) => reply.dataset.who.toLowerCase().includes(word));
    }
  });
  const label = document.createElement("label");
  label.append("First the samples ", order);
  bar.append(label, " ", filter);
  cards.before(bar);
}
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part instanceof HTMLDetailsElement) part.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", open);
open();
const tip = document.body.appendChild(Object.assign(document.createElement("div"), {id: "tip", hidden: true}));
for (const title of document.querySelectorAll("svg title")) {
  const mark = title.parentElement, text = title.textContent;
  title.remove();  // its own bubble would cover ours
  mark.setAttribute("aria-label", text);
  const show = (event) => {
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
  };
  mark.addEventListener("pointermove", show);
  mark.addEventListener("pointerdown", show);
  mark.addEventListener("pointerleave", () => { tip.hidden = true; });
}
