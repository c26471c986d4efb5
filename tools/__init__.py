"""Tools of the project's own checkout, in no wheel: speed, faults, GPU questions, theory."""
