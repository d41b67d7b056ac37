"""Makes a draft for a target: the target answers, the draft learns from that, serving's own verifier scores it."""
