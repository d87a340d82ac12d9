"""The frozen target: loading it, finding its layers, and handing out what they put out.

In come a model folder and padded token ids; out go features, the outputs of the tapped layers of all real tokens. How
text is decoded with the target belongs to `decode`, what is learned from its features to `drafter`.
"""
