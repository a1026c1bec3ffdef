"""Engine-to-engine hand-over of KV cache: the prefill executor's blocks become the decode executor's, whatever their sharding."""
