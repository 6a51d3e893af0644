// The public HTTP API as the page uses it. The key lives in this closure and nowhere else.

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const api = (() => {
  let key = null;

  async function request(path, options = {}) {
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("No connection to the server.", 0);
    }
    if (!response.ok) {
      const told = await response.json().catch(() => null);
      throw new ServerError(told?.error?.message ?? `The server answered ${response.status}.`, response.status);
    }
    return response;
  }

  // Events of a stream, in order. Throws ServerError for an error frame, and for an end without [DONE].
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const frames = (rest + value).split("\n\n");
        rest = frames.pop();
        for (const frame of frames.filter((text) => text.startsWith("data: "))) {
          const data = frame.slice(6);
          if (data === "[DONE]") return;
          const event = JSON.parse(data);
          if (event.error) throw new ServerError(event.error.message, 500);
          yield event;
        }
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ServerError) throw error;
      throw new ServerError("The connection broke off in the middle of the answer.", 0);
    } finally {
      reader.cancel().catch(() => {});
    }
    throw new ServerError("The answer ended before it was complete.", 0);
  }

  return {
    setKey: (value) => (key = value),
    json: async (path) => (await request(path)).json(),
    text: async (path) => (await request(path)).text(),
    // Chunks of a chat answer with provenance.
    async *chat(body, signal) {
      const asked = { ...body, stream: true, stream_options: { include_provenance: true } };
      const headers = { "Content-Type": "application/json" };
      yield* events(
        await request("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(asked), signal }),
      );
    },
  };
})();
