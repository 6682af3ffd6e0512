// A libnvidia-ml.so.1 with five GPUs, each with one peculiarity of real machines. Compiled by tests.rs.
#include <stdio.h>
#include <string.h>

typedef unsigned int uint;
enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };
enum { TO_GPU = 0, TO_SWITCH = 2, NOWHERE = 255 };

typedef struct {
  char legacy[16];
  uint domain, bus, device, id, subsystem;
  char bus_id[32];
} Pci;

typedef struct {
  uint type;
  const char* address;
} Link;

typedef struct {
  const char *uuid, *address, *name;
  int mig; // -1: no MIG support
  uint count;
  Link links[18];
} Gpu;

#define HIDDEN "FFFFFFFF:FF:FF.0"
static const Gpu gpus[] = {
    {"GPU-B", "00000000:3C:00.0", "NVIDIA One", 0, 6,
     {{TO_GPU, "00000000:3B:00.0"}, {TO_GPU, "00000000:3B:00.0"}, {NOWHERE, 0}, {TO_GPU, HIDDEN}, {TO_SWITCH, HIDDEN}, {TO_SWITCH, HIDDEN}}},
    {"GPU-A", "00000000:3B:00.0", "NVIDIA One", 0, 3,
     {{TO_GPU, "00000000:3C:00.0"}, {TO_GPU, "00000000:3C:00.0"}, {TO_SWITCH, "00000000:3C:00.0"}}},
    {"GPU-LOST", "00000000:40:00.0", "NVIDIA One", 0, 0, {{0}}},
    {"GPU-C", "00000000:5E:00.0", "NVIDIA Cut", 1, 2, {{TO_SWITCH, HIDDEN}, {TO_SWITCH, HIDDEN}}},
    {"GPU-D", "00000000:5D:00.0", "NVIDIA Alone", -1, 0, {{0}}},
};
static const Gpu instances[] = {{.uuid = "MIG-X"}, {.uuid = "MIG-Y"}};

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }

static int text(char* to, uint size, const char* from) {
  snprintf(to, size, "%s", from);
  return OK;
}

static int pci(Pci* to, const char* address) {
  memset(to, 0, sizeof *to);
  return text(to->bus_id, sizeof to->bus_id, address);
}

int nvmlSystemGetDriverVersion(char* to, uint size) { return text(to, size, "580.95.05"); }
int nvmlDeviceGetUUID(const Gpu* gpu, char* to, uint size) { return text(to, size, gpu->uuid); }
int nvmlDeviceGetName(const Gpu* gpu, char* to, uint size) { return text(to, size, gpu->name); }
int nvmlDeviceGetPciInfo_v3(const Gpu* gpu, Pci* to) { return pci(to, gpu->address); }

int nvmlDeviceGetCount_v2(uint* count) {
  *count = sizeof gpus / sizeof *gpus;
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, const Gpu** gpu) {
  *gpu = &gpus[index];
  return strcmp(gpus[index].uuid, "GPU-LOST") == 0 ? LOST : OK;
}

int nvmlDeviceGetMigMode(const Gpu* gpu, uint* current, uint* pending) {
  *current = *pending = gpu->mig == 1;
  return gpu->mig < 0 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetMaxMigDeviceCount(const Gpu* gpu, uint* count) {
  *count = gpu->mig == 1 ? 3 : 0;
  return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(const Gpu* gpu, uint index, const Gpu** instance) {
  *instance = &instances[index / 2];
  return gpu->mig == 1 && index != 1 ? OK : NOT_FOUND;
}

int nvmlDeviceGetNvLinkState(const Gpu* gpu, uint link, uint* up) {
  *up = gpu->links[link].type != NOWHERE;
  return link < gpu->count ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkVersion(const Gpu* gpu, uint link, uint* version) {
  *version = 6;
  return link < gpu->count ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(const Gpu* gpu, uint link, Pci* to) { return pci(to, gpu->links[link].address); }

#ifndef OLD_DRIVER
int nvmlDeviceGetNvLinkRemoteDeviceType(const Gpu* gpu, uint link, uint* type) {
  *type = gpu->links[link].type;
  return OK;
}
#endif

// All pairs may read and write, except that D may not write to A.
int nvmlDeviceGetP2PStatus(const Gpu* one, const Gpu* other, uint index, uint* status) {
  const int refused = index == 1 && strcmp(one->uuid, "GPU-D") == 0 && strcmp(other->uuid, "GPU-A") == 0;
  *status = index > 1 ? 6 : refused ? 5 : 0;
  return OK;
}
