// Browsers start no worker on pages that are opened as files. This one runs the script of the search in a hidden frame.
// Messages are copied and arrive later, as those of a worker do.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.appendChild(this.frame)
      const inside = this.frame.contentWindow
      const run = (from) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src: from, onload: resolve, onerror: reject })
          inside.document.body.appendChild(script)
        })
      inside.importScripts = (...from) => from.reduce((before, one) => before.then(() => run(one)), Promise.resolve())
      inside.postMessage = (data) => this.deliver(this, data)
      run(url).then(() => {
        this.ready = true
        this.queue.splice(0).forEach((data) => this.postMessage(data))
      }, () => this.onerror?.(new Event("error", { cancelable: true })))
    }
    deliver(to, data) {
      const event = new MessageEvent("message", { data: structuredClone(data) })
      setTimeout(() => {
        to.dispatchEvent(event)
        if (to === this) this.onmessage?.(event)
      })
    }
    postMessage(data) {
      if (this.ready) this.deliver(this.frame.contentWindow, data)
      else this.queue.push(data)
    }
    terminate() {
      this.frame.remove()
    }
  }
}
