/* The driver table of the emulated devices. */
#ifndef OCP_EMULATOR_CALLS_TABLE_H
#define OCP_EMULATOR_CALLS_TABLE_H

#include "driver/driver.h"

/* Returns the driver table of the emulated devices, configured as emulator.h says. Never NULL. */
const ocp_driver *ocp_driver_emulator(void);

#endif
