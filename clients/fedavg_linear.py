"""FedAvg of linear models at a party: train on from the average."""

from __future__ import annotations

from clients.scoring import Scored
from fedapp.data.partition import WATCHED
from fedapp.messages.fedavg_linear import (
    AverageReply,
    AverageRequest,
    MomentsReply,
    MomentsRequest,
    ScoreRequest,
)
from fedapp.messages.fields import check_fields, check_sizes
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.scoring import EvaluateReply
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.linear import GradientDescent, LinearModel, descend, moments, predict_linear


@role
class Averager(Scored):
    """A party of FedAvg."""

    order = Order(
        {
            HelloRequest: {MomentsRequest},
            MomentsRequest: {AverageRequest, ScoreRequest},
            AverageRequest: {AverageRequest, ScoreRequest},
        }
    )

    def sum_up(self, request: MomentsRequest) -> MomentsReply:
        """Sums of the labels, moments of the columns."""
        coded = self.code(request)
        of_columns = moments(self.values["train"], self.weights["train"], self.categories)
        return MomentsReply(
            **coded, counts=of_columns.counts, means=of_columns.means, squares=of_columns.squares
        )

    def train(self, request: AverageRequest) -> AverageReply:
        """Algorithm 1, lines 5 to 10: local epochs in mini-batches."""
        model = LinearModel(
            self.objective,
            self.columns,
            request.classes,
            request.means,
            request.scales,
            request.weights,
            request.bias,
            self.categories,
        )
        check_sizes(self.name, request, n_inputs=model.n_inputs, n_outputs=model.n_outputs)
        check_fields(
            self.name,
            request,
            ("classes", request.classes == self.classes, "must be those of the run"),
            ("scales", (request.scales > 0).all(), "must be > 0"),
        )
        descent = GradientDescent(
            request.epochs, request.batch_size, request.learning_rate, request.decay, request.l2
        )
        rng = self.site.random(request.seed, request.round_id)
        rows = self.values["train"], self.labels["train"], self.weights["train"]
        trained = descend(model, rows, descent, rng)
        margins = {subset: predict_linear(model, self.values[subset]) for subset in WATCHED}
        scores = self.score_fields(margins, request.score_bins, float(model.base_margin[0]))
        return AverageReply(weights=trained.weights, bias=trained.bias, **scores)

    def score(self, request: ScoreRequest) -> EvaluateReply:
        """Scores of the finished model on all rows."""
        scores, _ = self.score_subsets(request, LinearModel, predict_linear)
        scores["few"] = self.few_rows(())
        self.end()
        return EvaluateReply(**scores)


HANDLERS = handlers(Averager)
