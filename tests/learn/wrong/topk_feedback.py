from answers import Answer

RESIDUALS = "        self.residuals = {parameter: parameter.new_zeros(parameter.numel()) for parameter in parameters}\n"
PLACES = "        places = row.abs().topk(k).indices\n"
CHOSEN = "        return row[places], places\n"
IF_FINITE = "        if gradient.isfinite().all():\n"
ADD = "            residual += gradient\n"
CHOOSE = "        values, places = self.chosen(residual)\n"
GATHER = "        all_values, all_places = self.comms.all_gather(values), self.comms.all_gather(places)\n"
REDUCE = "        residual[places] -= values\n"
TOTAL = "        total = torch.zeros_like(residual)\n"
LOOP = "        for values, places in zip(all_values, all_places, strict=True):\n"
SUM = "            total.index_add_(0, places, values)\n"
GRAD = "        parameter.grad = (total / self.comms.world_size).view_as(parameter)\n"

ANSWERS = [
    Answer(
        "no feedback",
        {IF_FINITE + ADD: "        residual.copy_(gradient)\n"},
        "there is no feedback: what was not sent is lost",
        quick=True,
    ),
    Answer(
        "the residual is emptied",
        {REDUCE: "        residual.zero_()\n"},
        "there is no feedback: what was not sent is lost",
    ),
    Answer(
        "the residual is not reduced by what was sent",
        {REDUCE: ""},
        "what was sent is still in the residual: it would be sent again and again",
        quick=True,
    ),
    Answer(
        "the residual is reduced by the average",
        {REDUCE: "", GRAD: GRAD + "        residual -= parameter.grad.view(-1)\n"},
        "the average is taken out of the residual: take out what this rank has sent itself",
        quick=True,
    ),
    Answer(
        "the largest by value",
        {PLACES: PLACES.replace(".abs()", "")},
        "the largest by value are chosen, and not by magnitude",
        quick=True,
    ),
    Answer(
        "the magnitudes are sent",
        {PLACES + CHOSEN: "        return row.abs().topk(k)\n"},
        "the magnitudes are sent instead of the numbers: their signs are lost",
    ),
    Answer("the smallest", {PLACES: PLACES.replace("topk(k)", "topk(k, largest=False)")}, "the smallest are chosen"),
    Answer(
        "the values of the gradient",
        {CHOOSE: CHOOSE + "        values = gradient[places]\n"},
        "the values of the gradient are sent at these places, without what was kept there",
    ),
    Answer(
        "places are not sent",
        {
            GATHER: "        all_values = self.comms.all_gather(values)\n"
            "        all_places = [places] * len(all_values)\n"
        },
        "the other ranks' values are added at this rank's own places",
        quick=True,
    ),
    Answer(
        "its own first, then the others",
        {
            TOTAL: TOTAL + "        mine = self.comms.rank\n"
            "        all_values.insert(0, all_values.pop(mine))\n"
            "        all_places.insert(0, all_places.pop(mine))\n"
        },
        "differ from rank 0's in their last digits: add in the order of ranks, 0 first, on every rank",
        quick=True,
    ),
    Answer("no mean", {"(total / self.comms.world_size)": "total"}, "added up and not divided by the number of ranks"),
    Answer(
        "averaged twice",
        {SUM: SUM.replace("values)", "values / self.comms.world_size)")},
        "divided twice by the number of ranks",
    ),
    Answer(
        "its own alone",
        {LOOP + SUM: "        total.index_add_(0, places, values)\n", GRAD: GRAD},
        "only what this rank has sent is in it",
    ),
    Answer(
        "the last rank replaces the others",
        {SUM: "            total[places] = values\n"},
        "where two ranks have sent the same place, one replaces the other: add them",
    ),
    Answer(
        "a residual for each shape",
        {
            RESIDUALS: "        self.residuals = {p.shape: p.new_zeros(p.numel()) for p in parameters}\n",
            "self.residuals[parameter]": "self.residuals[parameter.shape]",
        },
        "parameters of the same shape share a residual: each parameter has its own",
        quick=True,
    ),
    Answer(
        "one residual for all",
        {
            RESIDUALS: "        self.residual = torch.zeros(0)\n",
            "        residual = self.residuals[parameter]\n": (
                "        if self.residual.shape != gradient.shape:\n"
                "            self.residual = torch.zeros_like(gradient)\n"
                "        residual = self.residual\n"
            ),
        },
        "all parameters share a residual: each parameter has its own",
    ),
    Answer(
        "nan is sent",
        {IF_FINITE + ADD: "        residual += gradient\n"},
        "a number that is not finite (inf or nan) was sent: it is in the average of all ranks",
        quick=True,
    ),
    Answer(
        "nan becomes zero, and the rest is used",
        {IF_FINITE + ADD: "        residual += gradient.nan_to_num(0, 0, 0)\n"},
        "only the numbers that are not finite are left out: leave out the whole gradient",
    ),
    Answer(
        "a rank with nan makes no call",
        {
            IF_FINITE
            + ADD: "        if not gradient.isfinite().all():\n            return\n        residual += gradient\n"
        },
        "rank 1 makes no call. The others gather all the same",
    ),
    Answer(
        "sends the whole row, with zeros",
        {
            GATHER: "        whole = torch.zeros_like(residual)\n        whole[places] = values\n"
            "        all_values = self.comms.all_gather(whole)\n",
            LOOP + SUM: "        for whole in all_values:\n            total += whole\n",
        },
        "that is the whole of it, with zeros. Send the",
    ),
    Answer(
        "an all-reduce of the whole row",
        {
            GATHER: "        whole = torch.zeros_like(residual)\n        whole[places] = values\n"
            "        self.comms.all_reduce(whole)\n",
            LOOP + SUM: "        total += whole\n",
        },
        "comms.all_reduce is not for this exercise",
    ),
    Answer(
        "sends everything twice",
        {GATHER: GATHER + GATHER},
        "values and",
    ),
    Answer(
        "the flat row",
        {GRAD: GRAD.replace(".view_as(parameter)", "")},
        "attempting to assign a gradient of size '[20]' to a tensor of size '[4, 5]'",
    ),
    Answer(
        "takes it out before it is chosen",
        {
            PLACES + CHOSEN: PLACES
            + "        values = row[places]\n        row[places] = 0\n        return values, places\n"
        },
        "chosen changes the tensor that it is given",
    ),
]
