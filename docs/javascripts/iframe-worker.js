// Browsers start no Worker for a page that was opened from disk, and the search is one. There a hidden frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = (this.frame = document.createElement("iframe"));
      this.inside = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.tell(data);
          const script = inner.document.createElement("script");
          script.src = new URL(url, document.baseURI);
          script.onload = () => resolve(inner);
          inner.document.head.append(script);
        };
      });
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      document.documentElement.append(frame);
    }

    tell(data) {
      const event = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(event);
      this.dispatchEvent(event);
    }

    postMessage(data) {
      this.inside.then((inner) => inner.onmessage(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
