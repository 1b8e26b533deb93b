"""Trained heads: small networks that draft from a target's hidden states.

A network (layers.py, eagle.py, ...) is the same module where it is trained and where it drafts;
attention is handed in. folder.py keeps it on disk, model.py makes it a Model.
"""
