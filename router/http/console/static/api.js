// Requests to the router, with the keys of this tab.

const API_KEY = "baton.apiKey";
const ADMIN_KEY = "baton.adminKey";

export const keys = {
  get api() { return sessionStorage.getItem(API_KEY) ?? ""; },
  get admin() { return sessionStorage.getItem(ADMIN_KEY) ?? ""; },
  set api(key) { keep(API_KEY, key); },
  set admin(key) { keep(ADMIN_KEY, key); },
};

function keep(name, key) {
  if (key) sessionStorage.setItem(name, key);
  else sessionStorage.removeItem(name);
}

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const PATIENCE_MS = 10_000;

// The answer of a path as JSON. Throws HttpError, or TypeError and DOMException if the router does not answer.
export async function getJson(path) {
  const response = await send(path, { signal: AbortSignal.timeout(PATIENCE_MS) }, keys.api);
  return response.json();
}

// A change of the fleet, with the admin key.
export async function admin(path, body) {
  const request = { method: "POST", signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body) Object.assign(request, { body: JSON.stringify(body), headers: { "content-type": "application/json" } });
  const response = await send(path, request, keys.admin);
  return response.json();
}

// The response to a streamed request; `signal` ends it.
export function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", body: JSON.stringify(body), headers, signal }, keys.api);
}

async function send(path, request, key) {
  const headers = { ...request.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...request, headers, cache: "no-store" });
  if (!response.ok) throw new HttpError(response.status, await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
