"""Where the screen gets its trace from: an engine that runs (`live`), or a recording (`recorded`)."""
