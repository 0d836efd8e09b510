// Asks for the keys of this tab.

import { keys } from "./api.js";
import { byId } from "./dom.js";

export class KeysDialog {
  // `used` is called when keys were given.
  constructor(used) {
    this.dialog = byId("keys");
    byId("keys-button").addEventListener("click", () => this.open());
    byId("keys-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keys.api = byId("api-key").value.trim();
      keys.admin = byId("admin-key").value.trim();
      this.dialog.close();
      used();
    });
  }

  open() {
    byId("api-key").value = keys.api;
    byId("admin-key").value = keys.admin;
    if (!this.dialog.open) this.dialog.showModal();
  }
}
