// Numbers for people.

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.0995) return `${(value * 1e3).toPrecision(value < 0.001 ? 1 : 2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  return value < 99.95 ? `${value.toPrecision(3)} s` : `${Math.round(value)} s`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 99.5 ? value.toPrecision(2) : Math.round(value)} ${units[unit]}`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export const percent = (share) => `${Math.round(100 * share)}%`;

export const clock = (date) => date.toLocaleTimeString([], { hour12: false });

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
