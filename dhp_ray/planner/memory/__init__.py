"""Bytes of packs: the shape of a model, what ranks hold on devices and in nodes, which layers are relieved."""
