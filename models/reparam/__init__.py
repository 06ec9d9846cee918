"""From a YOLOv9 network as it is trained, with an auxiliary branch, to the GELAN network that is deployed.

variants.py     which training layers a deployed network is made of, for each of upstream's; which one a network is
conversion.py   the deployed network: its description, its tensors, and whether it computes the same
"""
