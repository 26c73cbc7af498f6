// A page opened from a folder may not start a worker, which the theme's search needs: there, its script runs in a frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      this.started = new Promise(resolve => { script.onload = () => resolve(inside) })
      inside.document.body.append(script)
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }))
    }
  }
