"""Score rows in Triton Inference Server, by its Python backend and without hotbed.

``config.pbtxt`` has the path of the exported model. ``reader.py`` computes the scores.
"""

import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from reader import Model


class TritonPythonModel:
    """A model as Triton's Python backend calls it."""

    def initialize(self, args):
        """Open the exported model."""
        torch.set_num_threads(1)  # requests are computed beside each other, by the instances of config.pbtxt
        parameters = json.loads(args["model_config"])["parameters"]
        encoded = parameters.get("encoded", {}).get("string_value") == "true"
        self.model = Model(parameters["model"]["string_value"], encoded=encoded)

    def execute(self, requests):
        """Answer requests, each with rows as JSON; one that cannot be scored gets an error and the others scores."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            texts = pb_utils.get_input_tensor_by_name(request, "ROWS").as_numpy()
            with torch.no_grad():
                scores = self.model.scores([json.loads(text) for text in texts]).numpy()
        except (ValueError, KeyError, TypeError, IndexError) as error:
            fault = pb_utils.TritonError(f"the rows cannot be scored: {type(error).__name__} {error}")
            return pb_utils.InferenceResponse(output_tensors=[], error=fault)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SCORES", scores.astype(np.float64))])
