"""Wire formats: frames, messages, errors and the control plane's .proto. No I/O."""
