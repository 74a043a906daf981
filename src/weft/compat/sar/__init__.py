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
from .comm import CommThread as CommThread
from .comm import Config as Config
from .comm import SocketInfo as SocketInfo
from .comm import all_reduce as all_reduce
from .comm import all_to_all as all_to_all
from .comm import all_to_all_gloo_support as all_to_all_gloo_support
from .comm import all_to_all_rounds as all_to_all_rounds
from .comm import backend as backend
from .comm import comm_device as comm_device
from .comm import comm_thread as comm_thread
from .comm import dump_ip_address as dump_ip_address
from .comm import exchange_single_tensor as exchange_single_tensor
from .comm import exchange_tensors as exchange_tensors
from .comm import gather_grads as gather_grads
from .comm import get_ip_address as get_ip_address
from .comm import get_socket as get_socket
from .comm import initialize_comms as initialize_comms
from .comm import is_initialized as is_initialized
from .comm import master_ip as master_ip
from .comm import master_port as master_port
from .comm import nfs_ip_init as nfs_ip_init
from .comm import rank as rank
from .comm import sync_params as sync_params
from .comm import world_size as world_size
