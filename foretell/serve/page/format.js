// Numbers and counts in words.

/** `1 token`, `1,024 tokens`. */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A number with as many digits as are worth reading: `0.87`, `12.3`, `1,204`; a dash for none. */
export function figure(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const places = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", {
    minimumFractionDigits: places,
    maximumFractionDigits: places,
  });
}

/** `62 %` of a share from 0 to 1; a dash where there is nothing to share. */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

/** Bytes in the largest unit that leaves a whole part. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (number >= 1000 && i < units.length - 1) {
    number /= 1000;
    i += 1;
  }
  return `${i && number < 10 ? number.toFixed(1) : Math.round(number)} ${units[i]}`;
}

/** A token's text as one visible word, at most `limit` letters. */
export function visible(text, limit = 14) {
  const spaces = (found) => "·".repeat(found.length);
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, spaces) || "∅";
  const letters = [...shown];
  return letters.length > limit ? `${letters.slice(0, limit - 1).join("")}…` : shown;
}

/** A message that ends with a stop, and begins with a capital unless a name from code begins it. */
export function sentence(text) {
  const word = /^[a-z]+[ ,.]/.test(text);
  const whole = word ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
