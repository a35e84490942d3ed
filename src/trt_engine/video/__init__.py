"""Video: decoders, streams in real time, frames through an engine, drawn clips."""
