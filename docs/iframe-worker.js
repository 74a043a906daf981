// A browser starts no worker for a page that is opened from its folder. There the worker of the
// search runs in a frame. Material would load such a script from elsewhere, unless one of this
// name is among `polyfills` of mkdocs.yml.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      // what the script posts reaches who listens here
      this.frame.postToPage = (data) => this.dispatchEvent(new MessageEvent("message", {data}))
      this.frame.srcdoc =
        `<script>postMessage = frameElement.postToPage</script><script src="${script}"></script>`
      this.loaded = new Promise((resolve) => { this.frame.onload = resolve })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.loaded.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }
}
