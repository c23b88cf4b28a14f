/* Pauses the work of all streams, for code that replaces the pages of device memory. */
#ifndef OCP_EMULATOR_EXTERNAL_PAUSE_H
#define OCP_EMULATOR_EXTERNAL_PAUSE_H

/* Waits until no operation runs, and lets none begin until emu_resume. The caller holds no lock of streams. */
void emu_pause(void);
void emu_resume(void);

#endif
