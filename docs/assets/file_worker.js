// The search of these pages runs in a Worker, and browsers start none for pages that lie in the file system. There an
// iframe, in which the worker's script is loaded, stands in for it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (each) =>
        new Promise((done, failed) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, {src: new URL(each, base).href, onload: done, onerror: failed});
          frame.contentDocument.head.append(script);
        });
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.inside = inside;
      this.loaded = load(base);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
