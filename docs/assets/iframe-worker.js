// The search of a site opened from disk: browsers refuse workers there, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.view = frame.contentWindow;
      addEventListener("message", event => {
        if (event.source !== this.view) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.ready = new Promise(done => {
        const inside = this.view.document, script = inside.createElement("script");
        this.view.postMessage = data => { setTimeout(() => this.view.eval("parent").dispatchEvent(
          new MessageEvent("message", { data, source: this.view }))); };
        this.view.importScripts = (...urls) => Promise.all(urls.map(from => new Promise(loaded => {
          const more = inside.createElement("script");
          more.src = from;
          more.onload = loaded;
          inside.body.append(more);
        })));
        script.src = url;
        script.onload = done;
        inside.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.view.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
