// What the modules of the page read from a browser when they are imported, or while they cache frames.
globalThis.window = globalThis;
globalThis.document = { baseURI: "http://127.0.0.1/ui/", hidden: false };
