"""SAR's communication routines, under their names and with their arguments.

SAR trains graph networks. Its only collectives are `all_to_all` and `all_reduce`. A program that
calls its communication routines runs over weft, on every backend, gloo included, if it imports

```python
import weft.compat.sar as sar
```

SAR's graph classes are not here.

Sources: Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training of
Graph Neural Networks on Large Graphs" (MLSys 2022), and SAR's guide, "SAR's communication
routines".
"""

from . import comm as comm
from .comm import all_reduce as all_reduce
from .comm import all_to_all as all_to_all
from .comm import gather_grads as gather_grads
from .comm import initialize_comms as initialize_comms
from .comm import nfs_ip_init as nfs_ip_init
from .comm import rank as rank
from .comm import sync_params as sync_params
from .comm import world_size as world_size
