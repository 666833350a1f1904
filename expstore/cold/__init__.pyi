from expstore.cold.download import pull as pull
from expstore.cold.object_storage import ObjectStorage as ObjectStorage
from expstore.cold.sweep import Pruned as Pruned
from expstore.cold.sweep import prune as prune
from expstore.cold.upload import push as push
from expstore.cold.version_list import RemoteVersion as RemoteVersion
from expstore.cold.version_list import versions as versions
